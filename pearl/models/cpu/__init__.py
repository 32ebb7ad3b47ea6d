"""The CPU back end of our own forward: functions in C, and what calls them."""
