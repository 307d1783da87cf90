"""Where a relay delivers to: functions, webhooks and brokers."""
