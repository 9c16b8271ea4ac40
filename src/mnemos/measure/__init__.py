"""What a program costs: seconds, bytes, multiply-adds, and the limits of the machine."""
