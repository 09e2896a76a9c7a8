"""Measurements of collectives, beside the MPI library and Gloo, and the tuner that makes tables of them."""
