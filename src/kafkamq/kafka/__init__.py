"""Queues on Kafka: producers, consumers and the in-process tracker, on confluent-kafka."""

from kafkamq.kafka.consumer import Consumer
from kafkamq.kafka.delivery import Delivery
from kafkamq.kafka.message import Message
from kafkamq.kafka.producer import Producer
from kafkamq.kafka.queue import Queue
from kafkamq.kafka.service import Service

__all__ = ["Consumer", "Delivery", "Message", "Producer", "Queue", "Service"]
