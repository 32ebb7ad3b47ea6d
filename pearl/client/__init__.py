"""What talks to a running target: requests, streams, conversations. Launches nothing."""
