"""Here are queues as users see them: service, queue, producer, consumer and message."""
