"""Looking at what was trained: tables, pictures, reports."""
