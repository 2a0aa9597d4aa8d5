"""What would work on one model: exits fitted, chosen and guaranteed; drafts that change nothing."""
