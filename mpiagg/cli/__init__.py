"""The command line: ``mpiagg demo``, ``bench``, ``tune``, ``simulate``, ``plan-training``, ``trace`` and ``info``.

Importing it does not import MPI: only a process that is a rank of a job does.
"""

from typing import Any

import click

import mpiagg
from mpiagg.cli.bench import bench
from mpiagg.cli.demo import demo
from mpiagg.cli.info import info
from mpiagg.cli.plan_training import command as plan_training
from mpiagg.cli.simulate import simulate
from mpiagg.cli.trace import trace
from mpiagg.cli.tune import tune
from mpiagg.launch import job


class _Commands(click.Group):
    """Commands that say it in one line if their output cannot be written."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except OSError:
            lost = job.lost_output()
            if lost is None:
                raise
            raise lost from None


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(mpiagg.__version__)
def main() -> None:
    """Aggregate gradients and weights across the ranks of an MPI job."""


main.add_command(demo)
main.add_command(bench)
main.add_command(simulate)
main.add_command(plan_training, "plan-training")
main.add_command(tune)
main.add_command(trace)
main.add_command(info)
