"""What was tried to break retrysafe from outside, grouped by the class of the defect."""
