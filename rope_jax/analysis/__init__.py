"""Analysis of trained models: tables, pictures, reports."""
