"""Small programs that show one thing each."""
