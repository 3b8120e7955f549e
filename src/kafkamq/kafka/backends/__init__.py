"""Queues with a topic of their own: the backends offsets, share and claims."""

from kafkamq.kafka.backends.consumer import TopicConsumer
from kafkamq.kafka.backends.message import TopicMessage
from kafkamq.kafka.backends.producer import TopicProducer

__all__ = ["TopicConsumer", "TopicMessage", "TopicProducer"]
