"""What exists, declared once: methods, acceptance rules, stop policies. No torch; all other packages may read it."""
