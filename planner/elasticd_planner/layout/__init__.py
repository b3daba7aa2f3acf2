"""Layouts: which device holds which box of a parameter, of its gradient and of its optimizer state."""
