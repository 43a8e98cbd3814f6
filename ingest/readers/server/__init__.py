"""What the server itself says besides traces: its log, its cache events, its clock."""
