"""Collective calls: the array functions, the communicator, and what both are resolved into."""
