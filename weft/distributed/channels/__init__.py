"""How ranks reach each other: in a group of all, through servers, or each its neighbours alone."""
