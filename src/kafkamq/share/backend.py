"""The backend ``share``: the broker's share group remembers what is done (KIP-932)."""

from kafkamq.queue.topic_backend import TopicBackend
from kafkamq.share.queue_consumer import ShareConsumer

backend = TopicBackend(ShareConsumer)
