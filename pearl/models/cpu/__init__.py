"""The CPU back end of our own forward: functions in C, and the Python code that calls them."""
