"""From values to text and tables for people, and to plain data for programs. No torch here."""
