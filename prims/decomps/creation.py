"""Rules of creation operators."""
