"""The backend ``offsets``: what is done is in the commits of a consumer group."""

from kafkamq.parallel.queue_consumer import OffsetsConsumer
from kafkamq.queue.topic_backend import TopicBackend

backend = TopicBackend(OffsetsConsumer)
