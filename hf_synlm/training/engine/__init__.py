"""From a command line to a saved model: arguments, loop, checkpoints, export."""
