"""Other libraries' names for what is here."""
