import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import io.confluent.parallelconsumer.internal.DrainingCloseable.DrainingMode;
import io.confluent.parallelconsumer.offsets.OffsetMapCodecManager;
import java.time.Duration;
import java.util.List;
import java.util.Properties;
import java.util.Set;
import java.util.TreeSet;
import java.util.concurrent.ConcurrentSkipListSet;
import java.util.stream.Collectors;
import java.util.stream.Stream;
import org.apache.kafka.clients.admin.Admin;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.TopicPartition;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

/**
 * A group that moves between the two implementations; partition 0 only.
 *
 * read SERVERS GROUP TOPIC: what Kafka's own client and Parallel Consumer's own decoder make of the
 * commit. work SERVERS GROUP TOPIC END STUCK,STUCK...: process up to END but for those, then leave.
 */
public class Handover {
    static Properties settings(String servers, String group) {
        var p = new Properties();
        p.put("bootstrap.servers", servers);
        p.put("group.id", group);
        p.put("auto.offset.reset", "earliest");
        p.put("enable.auto.commit", "false");
        return p;
    }

    static void read(String servers, String group, String topic) throws Exception {
        try (var admin = Admin.create(settings(servers, group))) {
            var commit = admin.listConsumerGroupOffsets(group).partitionsToOffsetAndMetadata().get()
                    .get(new TopicPartition(topic, 0));
            var metadata = commit.metadata();
            var incompletes = metadata.isEmpty() ? new TreeSet<Long>() : new TreeSet<>(OffsetMapCodecManager
                    .deserialiseIncompleteOffsetMapFromBase64(commit.offset(), metadata).getIncompleteOffsets());
            System.out.printf("{\"offset\": %d, \"characters\": %d, \"incompletes\": %s}%n",
                    commit.offset(), metadata.length(), incompletes);
        }
    }

    static void work(String servers, String group, String topic, int end, Set<Long> stuck) throws Exception {
        var consumer = new KafkaConsumer<>(settings(servers, group), new ByteArrayDeserializer(), new ByteArrayDeserializer());
        var pc = ParallelStreamProcessor.createEosStreamProcessor(
                ParallelConsumerOptions.<byte[], byte[]>builder()
                        .ordering(ProcessingOrder.KEY)
                        .maxConcurrency(16)
                        .consumer(consumer)
                        .commitInterval(Duration.ofMillis(100))
                        .build());
        pc.subscribe(List.of(topic));
        var done = new ConcurrentSkipListSet<Long>();
        pc.poll(context -> {
            long offset = context.offset();
            if (stuck.contains(offset)) throw new IllegalStateException("stuck");
            done.add(offset);
        });
        long deadline = System.nanoTime() + 30_000_000_000L;
        while ((done.isEmpty() || done.last() < end - 1) && System.nanoTime() < deadline) Thread.sleep(20);
        Thread.sleep(500);
        pc.close(Duration.ofSeconds(10), DrainingMode.DONT_DRAIN);
        System.out.printf("{\"done\": %s}%n", done);
    }

    public static void main(String[] args) throws Exception {
        if (args[0].equals("read")) {
            read(args[1], args[2], args[3]);
        } else {
            var stuck = Stream.of(args[5].split(",")).filter(s -> !s.isEmpty()).map(Long::parseLong).collect(Collectors.toSet());
            work(args[1], args[2], args[3], Integer.parseInt(args[4]), stuck);
        }
        System.exit(0);
    }
}
