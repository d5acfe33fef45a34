// A program as Java programs are: threads that compute, allocate, wait, sleep and serve.
//
// It takes words from standard input and answers each with a line.

import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.lang.management.GarbageCollectorMXBean;
import java.lang.management.ManagementFactory;
import java.net.InetAddress;
import java.net.InetSocketAddress;
import java.net.Socket;
import java.nio.ByteBuffer;
import java.nio.MappedByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.channels.SelectionKey;
import java.nio.channels.Selector;
import java.nio.channels.ServerSocketChannel;
import java.nio.channels.SocketChannel;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.List;
import java.util.Random;
import java.util.concurrent.LinkedBlockingQueue;
import java.util.concurrent.atomic.AtomicIntegerArray;
import java.util.concurrent.atomic.AtomicLongArray;
import java.util.concurrent.locks.LockSupport;
import java.util.function.BooleanSupplier;

public class Threads {
    interface Work { void run() throws Exception; }

    static final long PATIENCE = 50_000_000_000L; // nanoseconds

    static volatile String broken; // the first thing that anybody has found amiss
    static final List<Thread> threads = new ArrayList<>();
    static final int GOING = 13; // of the threads, those that go on by themselves
    static final AtomicLongArray rounds = new AtomicLongArray(GOING);

    static void amiss(String what) {
        if (broken == null) broken = Thread.currentThread().getName() + ": " + what;
    }

    static void start(String name, Work work) {
        Thread thread = new Thread(() -> {
            try {
                work.run();
            } catch (Throwable error) {
                amiss(error.toString());
                error.printStackTrace();
            }
        }, name);
        thread.setDaemon(true);
        threads.add(thread);
        thread.start();
    }

    static boolean until(BooleanSupplier condition) throws InterruptedException {
        for (long since = System.nanoTime(); !condition.getAsBoolean(); Thread.sleep(1))
            if (System.nanoTime() - since > PATIENCE || broken != null) return false;
        return true;
    }

    // money that is moved about, by several threads under one lock: none is made or lost

    static final Object bank = new Object();
    static final int[] accounts = new int[64];
    static long moved;
    static final long[] movedBy = new long[4];

    static void move(int who) throws InterruptedException {
        Random chance = new Random(who);
        for (int turn = 1; ; turn++) {
            synchronized (bank) {
                int amount = chance.nextInt(100);
                accounts[chance.nextInt(accounts.length)] -= amount;
                accounts[chance.nextInt(accounts.length)] += amount;
                moved++;
                movedBy[who]++;
            }
            if (turn % 100 == 0) {
                synchronized (bank) {
                    if (Arrays.stream(accounts).sum() != 0) amiss("the accounts do not add up");
                    if (Arrays.stream(movedBy).sum() != moved) amiss("moves are missing");
                }
                rounds.incrementAndGet(who);
                Thread.sleep(1);
            }
        }
    }

    // chains that live long enough to be moved by the collector, and much that does not

    static final class Link {
        final long number;
        final Link next;
        final byte[] filling = new byte[200];

        Link(long number, Link next) {
            this.number = number;
            this.next = next;
            Arrays.fill(filling, (byte) number);
        }
    }

    static Link chain(long from, int length) {
        Link first = null;
        for (long n = from + length - 1; n >= from; n--) first = new Link(n, first);
        return first;
    }

    static boolean sound(Link first, int length) {
        long number = first.number;
        for (Link link = first; link != null; link = link.next, number++, length--) {
            if (link.number != number) return false;
            for (byte one : link.filling) if (one != (byte) number) return false;
        }
        return length == 0;
    }

    static void allocate(int who) throws InterruptedException {
        Random chance = new Random(who);
        Link[] kept = new Link[200];
        for (int n = 0; n < kept.length; n++) kept[n] = chain(n, 50);
        for (long turn = 0; ; turn++) {
            for (int n = 0; n < 20; n++) kept[chance.nextInt(kept.length)] = chain(turn + n, 50);
            if (!sound(kept[chance.nextInt(kept.length)], 50)) amiss("a chain has changed");
            rounds.incrementAndGet(who);
            Thread.sleep(1);
        }
    }

    static long collections() {
        return ManagementFactory.getGarbageCollectorMXBeans().stream()
            .mapToLong(GarbageCollectorMXBean::getCollectionCount).sum();
    }

    // the same sum again and again: interpreted at first, then compiled, at last inlined

    static double term(int n) {
        return (n % 2 == 0 ? 4.0 : -4.0) / (2 * n + 1);
    }

    static double sum(int terms) {
        double sum = 0;
        for (int n = 0; n < terms; n++) sum += term(n);
        return sum;
    }

    static void compute(int who) throws InterruptedException {
        double first = sum(20_000);
        for (;;) {
            if (sum(20_000) != first) amiss("a sum has changed");
            rounds.incrementAndGet(who);
            Thread.sleep(1);
        }
    }

    static void sleep(int who) throws InterruptedException {
        for (;;) {
            Thread.sleep(20);
            rounds.incrementAndGet(who);
        }
    }

    // threads that wait, each in its own way, and count how often they were woken

    static final AtomicIntegerArray woken = new AtomicIntegerArray(6);
    static final AtomicIntegerArray permits = new AtomicIntegerArray(2);
    static final Object bell = new Object();
    static int rings;
    static final LinkedBlockingQueue<Integer> queue = new LinkedBlockingQueue<>();
    static volatile long taken;

    static void park(int who) {
        for (int seen = 0; ; seen++) {
            while (permits.get(who) == seen) LockSupport.park(permits);
            woken.incrementAndGet(who);
        }
    }

    static void listen(int who) throws InterruptedException {
        for (int heard = 0; ; heard++) {
            synchronized (bell) {
                while (rings == heard) bell.wait();
            }
            woken.incrementAndGet(who);
        }
    }

    static void take(int who) throws InterruptedException {
        for (;;) {
            taken = taken * 31 + queue.take();
            woken.incrementAndGet(who);
        }
    }

    static void dream(int who) {
        for (;;) {
            try {
                Thread.sleep(3_600_000);
                amiss("an hour has passed");
            } catch (InterruptedException expected) {
                woken.incrementAndGet(who);
            }
        }
    }

    // a server that writes every number it is sent into a mapped file, with their sum and count

    static MappedByteBuffer ledger;
    static ServerSocketChannel listener;
    static volatile int connections;

    static void serve() throws Exception {
        Selector selector = Selector.open();
        listener.configureBlocking(false);
        listener.register(selector, SelectionKey.OP_ACCEPT);
        for (;;) {
            selector.select();
            for (SelectionKey key : selector.selectedKeys()) {
                if (key.isAcceptable()) {
                    SocketChannel accepted = listener.accept();
                    accepted.configureBlocking(false);
                    accepted.register(selector, SelectionKey.OP_READ, ByteBuffer.allocateDirect(8));
                    connections++;
                    continue;
                }
                SocketChannel channel = (SocketChannel) key.channel();
                ByteBuffer asked = (ByteBuffer) key.attachment();
                if (channel.read(asked) < 0) {
                    channel.close();
                    connections--;
                } else if (!asked.hasRemaining()) {
                    long count = ledger.getLong(0) + 1, sum = ledger.getLong(8) + asked.getLong(0);
                    ledger.putLong((int) (8 + 8 * count), asked.getLong(0));
                    ledger.putLong(0, count);
                    ledger.putLong(ledger.capacity() - 8, sum);
                    ledger.putLong(8, sum);
                    channel.write(asked.clear().putLong(0, sum));
                    asked.clear();
                }
            }
            selector.selectedKeys().clear();
        }
    }

    static Socket connect() throws Exception {
        Socket socket = new Socket(InetAddress.getLoopbackAddress(), listener.socket().getLocalPort());
        socket.setSoTimeout(50_000);
        return socket;
    }

    static long send(Socket socket, long number) throws Exception {
        socket.getOutputStream().write(ByteBuffer.allocate(8).putLong(0, number).array());
        return ByteBuffer.wrap(socket.getInputStream().readNBytes(8)).getLong();
    }

    static String report() throws Exception {
        long[] then = new long[GOING];
        for (int n = 0; n < GOING; n++) then[n] = rounds.get(n);
        long collected = collections();
        boolean all = until(() -> collections() > collected);
        for (int n = 0; n < GOING; n++) {
            int who = n;
            all &= until(() -> rounds.get(who) > then[who] + 1);
        }
        if (broken != null) return "broken: " + broken;
        if (!all) return "somebody stands still: " + Arrays.toString(then) + " " + rounds;
        if (sum(20_000) != 3.1415426535898248) return "pi is " + sum(20_000);
        if (ledger.getLong(8) != ledger.getLong(ledger.capacity() - 8)) return "two sums";
        long alive = threads.stream().filter(Thread::isAlive).count();
        return String.format(
            "%d alive, %d sent, sum %d, woken %s, taken %d, %d connections",
            alive, ledger.getLong(0), ledger.getLong(8), woken, taken, connections);
    }

    public static void main(String[] arguments) throws Exception {
        try (FileChannel file = FileChannel.open(Path.of("/srv/ledger"), StandardOpenOption.CREATE,
                StandardOpenOption.READ, StandardOpenOption.WRITE)) {
            ledger = file.map(FileChannel.MapMode.READ_WRITE, 0, 1 << 20); // outlives its channel
        }
        ledger.position(8); // what is below: how many; their sum and the numbers follow
        listener = ServerSocketChannel.open().bind(
            new InetSocketAddress(InetAddress.getLoopbackAddress(), 0));
        for (int n = 0; n < 4; n++) { int who = n; start("mover " + n, () -> move(who)); }
        for (int n = 4; n < 8; n++) { int who = n; start("allocator " + n, () -> allocate(who)); }
        for (int n = 8; n < 11; n++) { int who = n; start("computer " + n, () -> compute(who)); }
        for (int n = 11; n < 13; n++) { int who = n; start("sleeper " + n, () -> sleep(who)); }
        List<Thread> parked = new ArrayList<>();
        for (int n = 0; n < 2; n++) {
            int who = n;
            start("parked " + n, () -> park(who));
            parked.add(threads.get(threads.size() - 1));
        }
        start("listener 0", () -> listen(2));
        start("listener 1", () -> listen(3));
        start("taker", () -> take(4));
        start("dreamer", () -> dream(5));
        Thread dreamer = threads.get(threads.size() - 1);
        start("server", Threads::serve);
        Socket kept = connect();

        BufferedReader input = new BufferedReader(new InputStreamReader(System.in));
        for (String line; (line = input.readLine()) != null; ) {
            String[] words = line.split(" ");
            switch (words[0]) {
                case "report" -> System.out.println(report());
                case "send" -> {
                    long first = send(kept, Long.parseLong(words[1]));
                    try (Socket fresh = connect()) {
                        System.out.println(first + " " + send(fresh, Long.parseLong(words[1])));
                    }
                    until(() -> connections == 1);
                }
                case "wake" -> {
                    int n = Integer.parseInt(words[1]) % 2;
                    int[] before = new int[6];
                    for (int i = 0; i < 6; i++) before[i] = woken.get(i);
                    permits.incrementAndGet(n);
                    LockSupport.unpark(parked.get(n));
                    synchronized (bell) {
                        rings++;
                        bell.notifyAll();
                    }
                    queue.put(Integer.parseInt(words[1]));
                    dreamer.interrupt();
                    boolean all = true;
                    for (int who : new int[] {n, 2, 3, 4, 5})
                        all &= until(() -> woken.get(who) == before[who] + 1);
                    System.out.println(all ? "woken" : "asleep still: " + woken);
                }
                case "collect" -> {
                    System.gc();
                    System.out.println("collected");
                }
                case "end" -> {
                    kept.close();
                    System.exit(broken == null && until(() -> connections == 0) ? 0 : 1);
                }
                default -> System.out.println("what? " + line);
            }
        }
    }
}
