"""What all rooms need: checks of arguments, and of JSON from anywhere."""
