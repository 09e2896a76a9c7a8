"""Plans: a schedule bound to a buffer and a communicator, ready to run again and again."""
