"""What all subpackages need: checks of arguments, and of JSON from anywhere."""
