"""From sessions to a profile, and what it is worth: tokens, calibration, validation, figures."""
