// A program in Go whose goroutines never rest: tokens that go around through channels, clients that
// ask a server on kept connections, trees that the collector walks all the time.
//
// It takes words from standard input and answers each with a line.
package main

import (
	"bufio"
	"context"
	"fmt"
	"io"
	"math/rand"
	"net"
	"net/http"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
)

const (
	patience  = 50 * time.Second
	places    = 8
	tokens    = 20
	clients   = 4
	gardeners = 3
	waiters   = 5000
)

var (
	broken atomic.Value // the first thing that anybody has found amiss
	going  [places + clients + gardeners]int64
)

func amiss(format string, values ...any) { broken.CompareAndSwap(nil, fmt.Sprintf(format, values...)) }

func until(condition func() bool) bool {
	for since := time.Now(); !condition(); time.Sleep(time.Millisecond) {
		if time.Since(since) > patience || broken.Load() != nil {
			return false
		}
	}
	return true
}

// A token is in one place at a time, and tells how often it has been passed on.
type token struct {
	number int
	passed int64
}

// pass hands tokens on to one of two other places, whichever takes it first.
func pass(place int, in <-chan *token, next [2]chan<- *token) {
	for held := range in {
		held.passed++
		atomic.AddInt64(&going[place], 1)
		if held.passed%8 == 0 {
			time.Sleep(time.Millisecond)
		}
		select {
		case next[0] <- held:
		case next[1] <- held:
		}
	}
}

// ask counts with the server, which counts for each client: no request is lost or made twice.
func ask(client int, url string) {
	kept := &http.Client{Transport: &http.Transport{MaxIdleConnsPerHost: 1}}
	for asked := 1; ; asked++ {
		answer, err := kept.Post(fmt.Sprintf("%s/%d", url, client), "text/plain", strings.NewReader(strconv.Itoa(asked)))
		if err != nil {
			amiss("client %d: %v", client, err)
			return
		}
		body, err := io.ReadAll(answer.Body)
		answer.Body.Close()
		if want := fmt.Sprintf("%d of %d", asked, client); err != nil || string(body) != want {
			amiss("client %d: %q instead of %q, %v", client, body, want, err)
			return
		}
		atomic.AddInt64(&going[places+client], 1)
		time.Sleep(time.Millisecond)
	}
}

type tree struct {
	left, right *tree
	value       int
}

func grow(depth, value int) *tree {
	if depth == 0 {
		return &tree{value: value}
	}
	return &tree{grow(depth-1, value), grow(depth-1, value), value}
}

func (t *tree) sum() int {
	if t == nil {
		return 0
	}
	return t.value + t.left.sum() + t.right.sum()
}

// tend keeps some trees, replaces one after the other, and looks whether the rest are as they were.
func tend(gardener int, chance *rand.Rand) {
	var kept [40]*tree
	for turn := 0; ; turn++ {
		n := chance.Intn(len(kept))
		if old := kept[n]; old != nil && old.sum() != 511*old.value {
			amiss("a tree of %d has a sum of %d", old.value, old.sum())
		}
		kept[n] = grow(8, turn)
		atomic.AddInt64(&going[places+clients+gardener], 1)
		time.Sleep(time.Millisecond)
	}
}

func main() {
	debug.SetGCPercent(10)
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	var connections int64
	var lock sync.RWMutex
	counts := map[string]int{}
	numbers := []string{}
	served := http.NewServeMux()
	served.HandleFunc("/", func(w http.ResponseWriter, r *http.Request) {
		who := strings.TrimPrefix(r.URL.Path, "/")
		said, _ := io.ReadAll(r.Body)
		lock.Lock()
		counts[who]++
		count := counts[who]
		lock.Unlock()
		if string(said) != strconv.Itoa(count) {
			amiss("client %s asks for the %s. time, as the %d. request", who, said, count)
		}
		fmt.Fprintf(w, "%d of %s", count, who)
	})
	served.HandleFunc("/keep", func(w http.ResponseWriter, r *http.Request) {
		said, _ := io.ReadAll(r.Body)
		lock.Lock()
		numbers = append(numbers, string(said))
		lock.Unlock()
	})
	server := &http.Server{
		Handler: served,
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				atomic.AddInt64(&connections, 1)
			}
		},
	}
	go server.Serve(listener)
	url := "http://" + listener.Addr().String()

	var channels [places]chan *token
	for n := range channels {
		channels[n] = make(chan *token, tokens*(n%2)) // some hold tokens, some only hand them over
	}
	for n := range channels {
		next := [2]chan<- *token{channels[(n+1)%places], channels[(n+3)%places]}
		go pass(n, channels[n], next)
	}
	var all [tokens]*token
	for n := range all {
		all[n] = &token{number: n}
	}
	go func() {
		for n, one := range all {
			channels[n%places] <- one
		}
	}()
	for n := 0; n < clients; n++ {
		go ask(n, url)
	}
	for n := 0; n < gardeners; n++ {
		go tend(n, rand.New(rand.NewSource(int64(n))))
	}

	// many that wait for something that comes only when it is asked for
	var opened int64
	gate := make(chan struct{})
	rest, stop := context.WithTimeout(context.Background(), time.Hour)
	pair := sync.NewCond(&sync.Mutex{})
	var rings, heard int64
	wait := func() {
		for n := 0; n < waiters; n++ {
			go func(gate <-chan struct{}, rest context.Context) {
				select {
				case <-gate:
				case <-rest.Done():
				}
				atomic.AddInt64(&opened, 1)
			}(gate, rest)
		}
	}
	wait()
	for n := 0; n < 2; n++ {
		go func() {
			pair.L.Lock()
			for seen := int64(0); ; seen++ {
				for rings == seen {
					pair.Wait()
				}
				atomic.AddInt64(&heard, 1)
			}
		}()
	}
	// a thread of the system's own, in a call that the runtime does not poll
	var bytesRead int64
	var pipe [2]int
	if err := syscall.Pipe(pipe[:]); err != nil {
		panic(err)
	}
	go func() {
		for one := make([]byte, 1); ; {
			if n, err := syscall.Read(pipe[0], one); n != 1 || err != nil {
				amiss("a pipe: %v", err)
				return
			}
			atomic.AddInt64(&bytesRead, 1)
		}
	}()

	report := func() string {
		var then [len(going)]int64
		for n := range then {
			then[n] = atomic.LoadInt64(&going[n])
		}
		var before, after runtime.MemStats
		runtime.ReadMemStats(&before)
		moving := until(func() bool {
			runtime.ReadMemStats(&after)
			return after.NumGC > before.NumGC
		})
		for n := range then {
			moving = until(func() bool { return atomic.LoadInt64(&going[n]) > then[n]+1 }) && moving
		}
		if what := broken.Load(); what != nil {
			return "broken: " + what.(string)
		}
		if !moving {
			return fmt.Sprint("somebody stands still: ", then, going)
		}
		lock.RLock()
		defer lock.RUnlock()
		return fmt.Sprintf("%d connections, kept %v, %d opened, %d heard, %d read, %d idle",
			atomic.LoadInt64(&connections), numbers, atomic.LoadInt64(&opened),
			atomic.LoadInt64(&heard), atomic.LoadInt64(&bytesRead), waiters)
	}

	keeper := &http.Client{Transport: &http.Transport{}} // unlike the default one it never hangs up
	words := bufio.NewScanner(os.Stdin)
	for words.Scan() {
		word, number, _ := strings.Cut(words.Text(), " ")
		switch word {
		case "report":
			fmt.Println(report())
		case "keep":
			answer, err := keeper.Post(url+"/keep", "text/plain", strings.NewReader(number))
			if err == nil {
				io.Copy(io.Discard, answer.Body)
				answer.Body.Close()
			}
			fmt.Println(err)
		case "open": // by closing a channel, or by cancelling: all go, and as many come
			then := atomic.LoadInt64(&opened)
			if number == "gate" {
				close(gate)
				gate = make(chan struct{})
			} else {
				stop()
				rest, stop = context.WithTimeout(context.Background(), time.Hour)
			}
			fmt.Println(until(func() bool { return atomic.LoadInt64(&opened) == then+waiters }))
			wait()
		case "ring":
			pair.L.Lock()
			rings++
			want := 2 * rings
			pair.Broadcast()
			pair.L.Unlock()
			syscall.Write(pipe[1], []byte{1})
			fmt.Println(until(func() bool {
				return atomic.LoadInt64(&heard) == want && atomic.LoadInt64(&bytesRead) == want/2
			}))
		case "free":
			debug.FreeOSMemory()
			fmt.Println("freed")
		case "end": // with every token where it can be counted
			var passed, counted int64
			seen := map[int]bool{}
			for len(seen) < tokens {
				for n := range channels {
					select {
					case one := <-channels[n]:
						if seen[one.number] {
							amiss("token %d is there twice", one.number)
						}
						seen[one.number] = true
						passed += one.passed
					case <-time.After(time.Millisecond):
					}
				}
				if broken.Load() != nil {
					break
				}
			}
			for n := 0; n < places; n++ {
				counted += atomic.LoadInt64(&going[n])
			}
			if broken.Load() != nil || passed != counted {
				fmt.Fprintln(os.Stderr, broken.Load(), passed, counted)
				os.Exit(1)
			}
			return
		}
	}
}
