"""Every shell gets its clients of Kafka here: settings, errors, topics, transactions."""
