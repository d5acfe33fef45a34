// A program of Node.js whose workers share memory and wait in it, while its own thread serves.
//
// It takes words from standard input and answers each with a line.
"use strict";
const http = require("http");
const readline = require("readline");
const { Worker, isMainThread, parentPort, workerData } = require("worker_threads");

const PATIENCE = 50_000; // milliseconds
const [PLAYERS, COUNTERS, WAITERS] = [4, 3, 2];
// where what lies in the shared memory
const ROUNDS = 0; // of each worker
const TURNS = 10; // whose turn it is, of each pair of players, and how many there were
const LOCK = 20;
const TOTAL = 21; // of what the counters count, under the lock
const OWN = 22;
const RINGS = 30; // of each waiter
const HEARD = 40;
const REST = 50; // that nobody ever rings for
const FIRST = 51; // a word that is written at the beginning, another at the end
const SIZE = 1 << 16;

function lock(memory) {
    while (Atomics.compareExchange(memory, LOCK, 0, 1) !== 0) Atomics.wait(memory, LOCK, 1);
}

function unlock(memory) {
    Atomics.store(memory, LOCK, 0);
    Atomics.notify(memory, LOCK, 1);
}

function amiss(what) {
    parentPort.postMessage(what);
    Atomics.wait(new Int32Array(new SharedArrayBuffer(4)), 0, 0); // nothing after the first
}

const works = {
    // two by two, each waits until it is its turn: strictly one after the other
    player(memory, n) {
        const [turn, count] = [TURNS + (n >> 1) * 2, TURNS + (n >> 1) * 2 + 1];
        for (let mine = n & 1; ; mine += 2) {
            while (Atomics.load(memory, turn) !== (n & 1)) Atomics.wait(memory, turn, 1 - (n & 1));
            const before = Atomics.add(memory, count, 1);
            if (before !== mine) amiss(`player ${n} was at turn ${before} instead of ${mine}`);
            Atomics.add(memory, ROUNDS + n, 1);
            if (!(n & 1)) Atomics.wait(memory, REST, 0, 1);
            Atomics.store(memory, turn, 1 - (n & 1));
            Atomics.notify(memory, turn);
        }
    },
    // many objects, counted under a lock that all share
    counter(memory, n) {
        const objects = new Map();
        for (let turn = 0; ; turn++) {
            for (let key = 0; key < 300; key++) {
                const old = objects.get(key);
                if (old && (old.key !== key || old.text !== `${key}:${old.turn}`)) amiss("changed");
                objects.set(key, { key, turn, text: `${key}:${turn}`, more: new Array(20).fill(n) });
            }
            lock(memory);
            memory[TOTAL]++;
            memory[OWN + n]++;
            let sum = 0;
            for (let i = 0; i < COUNTERS; i++) sum += memory[OWN + i];
            if (sum !== memory[TOTAL]) amiss(`${sum} were counted, not ${memory[TOTAL]}`);
            unlock(memory);
            Atomics.add(memory, ROUNDS + PLAYERS + n, 1);
            Atomics.wait(memory, REST, 0, 2);
        }
    },
    waiter(memory, n) {
        for (let heard = 0; ; heard++) {
            while (Atomics.load(memory, RINGS + n) === heard) Atomics.wait(memory, RINGS + n, heard);
            Atomics.add(memory, HEARD + n, 1);
            Atomics.notify(memory, HEARD + n);
        }
    },
};

async function main() {
    const memory = new Int32Array(new SharedArrayBuffer(4 * SIZE));
    memory[FIRST] = memory[SIZE - 1] = 7;
    let broken = null;
    const start = (kind, n) =>
        new Worker(__filename, { workerData: { kind, n, memory } })
            .on("message", (what) => { broken ??= what; })
            .on("error", (error) => { broken ??= error.stack; });
    const workers = [
        ...Array.from({ length: PLAYERS }, (_, n) => start("player", n)),
        ...Array.from({ length: COUNTERS }, (_, n) => start("counter", n)),
        ...Array.from({ length: WAITERS }, (_, n) => start("waiter", n)),
    ];

    const pause = () => new Promise((done) => setTimeout(done, 1));
    const until = async (condition) => {
        for (const since = performance.now(); !condition(); await pause())
            if (performance.now() - since > PATIENCE || broken !== null) return false;
        return true;
    };

    // a server that counts with each of its clients, which ask on kept connections all the time
    const counts = {};
    const kept = [];
    let connections = 0;
    const server = http.createServer((request, response) => {
        let said = "";
        request.on("data", (piece) => { said += piece; });
        request.on("end", () => {
            if (request.url === "/keep") {
                kept.push(said);
                response.end(`${kept}`);
                return;
            }
            const count = counts[request.url] = (counts[request.url] ?? 0) + 1;
            if (said !== `${count}`) broken ??= `${request.url} asks for ${said} as ${count}`;
            response.write(`${count}`); // in two pieces
            setImmediate(() => response.end(" of " + request.url));
        });
    });
    server.on("connection", () => { connections++; });
    // by the clock, which runs on while the program is gone back to
    server.keepAliveTimeout = server.requestTimeout = server.headersTimeout = 0;
    await new Promise((done) => server.listen(0, "127.0.0.1", done));
    const { port } = server.address();

    const ask = (agent, path, text) => new Promise((done, fail) => {
        const options = { port, host: "127.0.0.1", agent, path, method: "POST" };
        http.request(options, (answer) => {
            let said = "";
            answer.on("data", (piece) => { said += piece; });
            answer.on("end", () => done(said));
            answer.on("error", fail);
        }).on("error", fail).end(text);
    });
    const asked = [0, 0, 0];
    const client = async (n) => {
        const agent = new http.Agent({ keepAlive: true, maxSockets: 1 });
        for (;;) {
            const said = await ask(agent, `/${n}`, `${++asked[n]}`);
            if (said !== `${asked[n]} of /${n}`) broken ??= `client ${n}: ${said}`;
            if (asked[n] % 4 === 0) await pause();
        }
    };
    for (const n of asked.keys()) client(n).catch((error) => { broken ??= error.stack; });
    const keeper = new http.Agent({ keepAlive: true, maxSockets: 1 });

    const report = async () => {
        const then = [...memory.slice(ROUNDS, PLAYERS + COUNTERS), ...asked];
        const now = () => [...memory.slice(ROUNDS, PLAYERS + COUNTERS), ...asked];
        const moving = await until(() => now().every((rounds, n) => rounds > then[n] + 1));
        if (broken !== null) return `broken: ${broken}`;
        if (!moving) return `somebody stands still: ${then} ${now()}`;
        const rings = memory.slice(RINGS, RINGS + WAITERS);
        const ends = [memory[FIRST], memory[SIZE - 1]];
        return `kept ${kept}, ${connections} connections, ${rings} rung, ends ${ends}`;
    };

    const words = {
        report,
        keep: (number) => ask(keeper, "/keep", number),
        // who waits in the memory is told of a change that is there already
        ring: async (number) => {
            const n = number % WAITERS;
            const want = Atomics.add(memory, RINGS + n, 1) + 1;
            Atomics.notify(memory, RINGS + n);
            // waits here as well, without keeping this thread
            const heard = Atomics.waitAsync(memory, HEARD + n, want - 1, PATIENCE);
            const how = heard.async ? await heard.value : heard.value;
            return `${how} ${memory[HEARD + n] === want}`;
        },
        mark: (number) => {
            memory[FIRST] = memory[SIZE - 1] = number;
            return "marked";
        },
        end: async () => {
            await Promise.all(workers.map((worker) => worker.terminate()));
            process.exit(broken === null ? 0 : 1);
        },
    };
    for await (const line of readline.createInterface({ input: process.stdin })) {
        const [word, number] = line.split(" ");
        console.log(await words[word](number));
    }
}

if (isMainThread) main();
else works[workerData.kind](workerData.memory, workerData.n);
