"""What measures: simulator, theory, benchmarks, experiments, making and judging drafts. Nothing else imports it."""
