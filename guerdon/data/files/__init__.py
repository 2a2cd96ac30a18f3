"""Reading files that may be damaged or hostile: bounded, checked, and without running code in them."""
