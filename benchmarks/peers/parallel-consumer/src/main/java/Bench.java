import io.confluent.parallelconsumer.ParallelConsumerOptions;
import io.confluent.parallelconsumer.ParallelConsumerOptions.CommitMode;
import io.confluent.parallelconsumer.ParallelConsumerOptions.ProcessingOrder;
import io.confluent.parallelconsumer.ParallelStreamProcessor;
import io.confluent.parallelconsumer.internal.DrainingCloseable.DrainingMode;
import java.lang.management.ManagementFactory;
import java.nio.file.Files;
import java.nio.file.Path;
import java.time.Duration;
import java.util.Arrays;
import java.util.List;
import java.util.Locale;
import java.util.Properties;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.TimeUnit;
import java.util.concurrent.atomic.AtomicLong;
import java.util.concurrent.locks.LockSupport;
import org.apache.kafka.clients.consumer.ConsumerRecords;
import org.apache.kafka.clients.consumer.KafkaConsumer;
import org.apache.kafka.common.serialization.StringDeserializer;

/**
 * Reads topics that benchmarks/parallel.py has filled. Arguments: bootstrap address, then rows of
 * TOPIC:ORDERING:CONCURRENCY:MESSAGES. Each value is the record's own sleep in microseconds. One
 * JSON object a row: seconds from the first polled record to the last processed one, CPU, memory.
 */
public class Bench {
    static String brokers;

    static Properties settings() {
        var p = new Properties();
        p.put("bootstrap.servers", brokers);
        p.put("group.id", "peer-" + System.nanoTime());
        p.put("auto.offset.reset", "earliest");
        p.put("enable.auto.commit", "false");
        return p;
    }

    static double cpuSeconds() {
        var os = (com.sun.management.OperatingSystemMXBean) ManagementFactory.getOperatingSystemMXBean();
        return os.getProcessCpuTime() / 1e9;
    }

    static long memoryMiB() throws Exception {
        for (String line : Files.readAllLines(Path.of("/proc/self/status")))
            if (line.startsWith("VmRSS")) return Long.parseLong(line.replaceAll("\\D", "")) / 1024;
        return -1;
    }

    static void row(String spec) throws Exception {
        String[] parts = spec.split(":");
        int concurrency = Integer.parseInt(parts[2]), messages = Integer.parseInt(parts[3]);
        var first = new AtomicLong();
        var last = new AtomicLong();
        var consumer = new KafkaConsumer<String, String>(settings(), new StringDeserializer(), new StringDeserializer()) {
            @Override
            public ConsumerRecords<String, String> poll(Duration wait) {
                var records = super.poll(wait);
                if (!records.isEmpty()) first.compareAndSet(0, System.nanoTime());
                return records;
            }
        };
        var pc = ParallelStreamProcessor.createEosStreamProcessor(
                ParallelConsumerOptions.<String, String>builder()
                        .ordering(ProcessingOrder.valueOf(parts[1]))
                        .maxConcurrency(concurrency)
                        .consumer(consumer)
                        .commitMode(CommitMode.PERIODIC_CONSUMER_ASYNCHRONOUS)
                        .build());
        pc.subscribe(List.of(parts[0]));
        var left = new CountDownLatch(messages);
        double cpuBefore = cpuSeconds();
        pc.poll(context -> context.stream().forEach(record -> {
            long sleepUs = Integer.parseInt(record.value());
            if (sleepUs > 0) {
                long end = System.nanoTime() + sleepUs * 1000, rest;
                while ((rest = end - System.nanoTime()) > 0) LockSupport.parkNanos(rest);
            }
            last.set(System.nanoTime());
            left.countDown();
        }));
        boolean isDone = left.await(170, TimeUnit.SECONDS);
        double seconds = (last.get() - first.get()) / 1e9;
        System.out.printf(Locale.ROOT, "{\"seconds\": %.6f, \"cpu_s\": %.3f, \"memory_mib\": %d, \"done\": %b}%n",
                seconds, cpuSeconds() - cpuBefore, memoryMiB(), isDone);
        System.out.flush();
        pc.close(Duration.ofSeconds(10), DrainingMode.DONT_DRAIN);
    }

    public static void main(String[] args) throws Exception {
        brokers = args[0];
        for (String spec : Arrays.copyOfRange(args, 1, args.length)) row(spec);
        System.exit(0);
    }
}
