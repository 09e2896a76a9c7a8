"""What the tests of the ranks that need torch share."""

import torch

# The ranks outnumber the cores.
torch.set_num_threads(1)
