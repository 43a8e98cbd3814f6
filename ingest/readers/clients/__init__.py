"""What load generators leave behind."""
