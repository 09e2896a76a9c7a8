"""Write mpiagg/tables/default.json, the table that ``algorithm="auto"`` goes by, from the model of the schedules.

Run it after a change to the schedules, their prices, or ``mpiagg/tables/predicted.py``: ``python docs/make_tuning.py``.
"""

from mpiagg.tables.files import text_of
from mpiagg.tables.predicted import derived
from mpiagg.tables.settings import DEFAULT_FILE

if __name__ == "__main__":
    DEFAULT_FILE.write_text(text_of(derived()))
