import com.softwaremill.kmq.KafkaClients;
import com.softwaremill.kmq.KmqClient;
import com.softwaremill.kmq.KmqConfig;
import java.util.HashMap;
import java.util.Map;
import java.util.UUID;
import org.apache.kafka.clients.consumer.ConsumerRecord;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;
import org.apache.kafka.common.serialization.Deserializer;

/** Takes and acknowledges messages with kmq's client: prints messages per second. */
public class HandOut {
    /** Arguments: servers, message topic, marker topic, messages, records a poll. */
    public static void main(String[] args) throws Exception {
        int wanted = Integer.parseInt(args[3]);
        int most = Integer.parseInt(args[4]);
        KmqConfig config =
            new KmqConfig(args[1], args[2], "kmq-" + UUID.randomUUID(), "unused", 10_000L, 10_000L);
        KmqClient<byte[], byte[]> client = new KmqClient<>(
            config, new Clients(args[0], most), ByteArrayDeserializer.class,
            ByteArrayDeserializer.class, 1000L);
        int done = 0;
        while (done == 0) {
            done += take(client);
        }
        done = 0;
        long began = System.nanoTime();
        while (done < wanted) {
            done += take(client);
        }
        client.close(); // waits for the END markers
        System.out.println(done / ((System.nanoTime() - began) / 1e9));
    }

    private static int take(KmqClient<byte[], byte[]> client) {
        ConsumerRecords<byte[], byte[]> records = client.nextBatch();
        for (ConsumerRecord<byte[], byte[]> record : records) {
            if (record.value() == null) {
                throw new IllegalStateException("no payload");
            }
            client.processed(record);
        }
        return records.count();
    }

    private static final class Clients extends KafkaClients {
        private final String servers;
        private final int most;

        Clients(String servers, int most) {
            super(servers);
            this.servers = servers;
            this.most = most;
        }

        @Override
        public <K, V> KafkaConsumer<K, V> createConsumer(
            String group, Class<? extends Deserializer<K>> keys,
            Class<? extends Deserializer<V>> values) {
            Map<String, Object> settings = new HashMap<>();
            settings.put("bootstrap.servers", servers);
            settings.put("enable.auto.commit", "false");
            settings.put("key.deserializer", keys.getName());
            settings.put("value.deserializer", values.getName());
            settings.put("auto.offset.reset", "earliest");
            settings.put("group.id", group);
            settings.put("max.poll.records", most);
            return new KafkaConsumer<>(settings);
        }
    }
}
