"""Whether a coefficient release may replace another."""
