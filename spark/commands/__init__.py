"""What stands around the commands: their options, output and end, and those that are programs of their own."""
