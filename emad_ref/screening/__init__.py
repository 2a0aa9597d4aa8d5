"""What would work on one model: exits that are fitted, chosen and guaranteed, drafts that change nothing, and the rest."""
