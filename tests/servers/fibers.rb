# A program in Ruby: threads that hand a lock around, fibers that stand in the middle of their work,
# a server, a child and a process that was forked.
#
# It takes words from standard input and answers each with a line.
require "monitor"
require "socket"
require "timeout"

$stdout.sync = true
Thread.report_on_exception = false
Thread.abort_on_exception = false
PATIENCE = 50 # seconds

$broken = nil # the first thing that anybody has found amiss
$rounds = Hash.new(0)

def amiss(what) = $broken ||= what

def start(name)
  Thread.new do
    yield
  rescue Exception => error
    amiss("#{name}: #{error.full_message(highlight: false)}")
  end
end

def until_true
  since = Process.clock_gettime(Process::CLOCK_MONOTONIC)
  until yield
    return false if $broken || Process.clock_gettime(Process::CLOCK_MONOTONIC) - since > PATIENCE
    sleep 0.001
  end
  true
end

# what several threads move about under one lock: none is made or lost
bank = Mutex.new
accounts = Array.new(50, 0)
moved = 0
moved_by = Array.new(3, 0)
3.times do |who|
  start("mover #{who}") do
    chance = Random.new(who)
    loop do
      bank.synchronize do
        amount = chance.rand(100)
        accounts[chance.rand(50)] -= amount
        Thread.pass # with the lock in its hands
        accounts[chance.rand(50)] += amount
        moved += 1
        moved_by[who] += 1
        amiss("the accounts do not add up") unless accounts.sum.zero?
        amiss("moves are missing") unless moved_by.sum == moved
      end
      $rounds["mover #{who}"] += 1
      sleep 0.001 if $rounds["mover #{who}"] % 10 == 0
    end
  end
end

# numbers that go through two queues, of which one is full most of the time
raw, made = SizedQueue.new(3), Queue.new
start("producer") { (0..).each { |n| raw << n } }
start("factory") { loop { made << raw.pop.to_s } }
start("consumer") do
  (0..).each do |n|
    got = made.pop
    amiss("#{got} came instead of #{n}") unless got == n.to_s
    $rounds["consumer"] += 1
    sleep 0.001 if n % 10 == 0
  end
end

# objects of all kinds, most of which are dropped soon
start("gardener") do
  kept = {}
  (0..).each do |turn|
    200.times do |n|
      old = kept[n]
      amiss("what was kept has changed") if old && old != [n.to_s * 20, { n => old[1][n] }]
      kept[n] = [n.to_s * 20, { n => turn }] if (n + turn) % 7 == 0
    end
    $rounds["gardener"] += 1
    sleep 0.001
  end
end

# fibers: each in the middle of a loop, with a stack of its own
def walk(tree, &block)
  return if tree.zero?
  walk(tree - 1, &block)
  block.call(tree)
  walk(tree - 1, &block)
end
fibers = Array.new(50) { |n| Fiber.new { walk(10) { |depth| Fiber.yield(depth + n) }; :done } }
fibers.each_with_index { |fiber, n| (n + 1).times { fiber.resume } }
steps = []
walk(10) { |depth| steps << depth }
resumed = 0
primes = Enumerator.new do |found|
  (2..).each { |n| found << n if (2..Integer.sqrt(n)).none? { |by| (n % by).zero? } }
end
20.times { primes.next }

# threads that wait until they are woken
door = Monitor.new
bell = door.new_cond
rings = heard = 0
start("listener") do
  door.synchronize do
    loop do
      bell.wait_while { heard == rings }
      heard += 1
    end
  end
end
interrupted = 0
dreamer = start("dreamer") do
  loop do
    sleep
    interrupted += 1
  end
end

# a server with a thread for each client, which counts, and clients that count as well
server = TCPServer.new("127.0.0.1", 0)
counts = Hash.new(0)
kept = []
serving = 0
start("server") do
  loop do
    client = server.accept
    start("handler") do
      serving += 1
      while (line = client.gets)
        who, what = line.split
        if who == "keep"
          kept << what
          client.puts(kept.join(" "))
        else
          counts[who] += 1
          amiss("#{who} says #{what}, not #{counts[who]}") unless what == counts[who].to_s
          client.puts("#{who} #{what}")
        end
      end
      serving -= 1
    end
  end
end
connect = -> { TCPSocket.new("127.0.0.1", server.addr[1]) }
3.times do |who|
  start("client #{who}") do
    connection = connect.call
    (1..).each do |n|
      connection.puts("client#{who} #{n}")
      answer = connection.gets
      amiss("client #{who}: #{answer} after #{n}") unless answer == "client#{who} #{n}\n"
      $rounds["client #{who}"] += 1
      sleep 0.001 if n % 5 == 0
    end
  end
end
keeper = connect.call

# a child that adds up what it is told, forked without exec, with a copy of all that is above
to_child, from_child = [IO.pipe, IO.pipe].then { |a, b| [a[1], b[0]].tap { $ends = [a[0], b[1]] } }
child = fork do
  [to_child, from_child, server, keeper].each(&:close)
  sum = 0
  while (line = $ends[0].gets)
    sum += line.to_i
    line.to_i.times { primes.next }
    $ends[1].puts("#{sum} #{primes.peek}")
  end
  exit!(0)
end
$ends.each(&:close)

ask = lambda do |number|
  to_child.puts(number)
  from_child.gets.chomp
end

report = lambda do
  then_ = $rounds.dup
  collected = GC.count
  moving = until_true { $rounds.size == 8 && GC.count > collected }
  moving &&= until_true { $rounds.all? { |name, rounds| rounds > then_[name] + 1 } }
  if $broken
    "broken: #{$broken.inspect}"
  elsif !moving
    "somebody stands still: #{then_} #{$rounds} #{Thread.list.map(&:status)}"
  else
    door.synchronize do
      "#{Thread.list.size} threads, kept #{kept.join(" ")}, #{heard} of #{rings} heard, " \
        "#{interrupted} interrupted, #{resumed} resumed, #{primes.peek}, " \
        "child #{ask.call(0)}, #{serving} served"
    end
  end
end

while (line = $stdin.gets)
  word, number = line.split
  case word
  when "report" then puts report.call
  when "keep"
    keeper.puts("keep #{number}")
    puts keeper.gets
  when "resume" # all fibers, and a fresh one in a fresh thread
    fresh = Thread.new { Fiber.new { walk(3) { |depth| Fiber.yield(depth) } }.resume }.value
    resumed += 1
    right = Array.new(50) { |n| steps[n + resumed] + n }
    puts [fibers.map(&:resume) == right, primes.next, fresh].join(" ")
  when "ring"
    want = interrupted + 1
    door.synchronize { rings += 1; bell.broadcast }
    dreamer.wakeup
    puts until_true { door.synchronize { heard == rings } && interrupted == want }
  when "child"
    puts ask.call(number)
  when "late" # Ruby's own timers
    begin
      Timeout.timeout(0.02) { sleep }
    rescue Timeout::Error
      puts "late"
    end
  when "compact"
    GC.compact
    puts "compacted"
  when "end"
    to_child.close
    Process.wait(child)
    amiss("the child: #{$?}") unless $?.success?
    keeper.close
    good = until_true { serving == 3 }
    warn($broken) if $broken
    exit!(good && !$broken ? 0 : 1)
  end
end
