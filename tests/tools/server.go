// A program as Go programs are: goroutines on many threads, timers, the network poller, a child.
//
// It takes words from standard input and answers each with a line.
package main

import (
	"bufio"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptrace"
	"os"
	"os/exec"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"time"
)

var (
	served      int64 // requests, only ever changed by a request
	connections int64 // accepted
	spins       int64
	ticks       = make(chan time.Time)
)

// ring passes a number around through many goroutines, each of which adds one.
func ring(members int) (chan<- int, <-chan int) {
	first := make(chan int)
	in := first
	for i := 0; i < members; i++ {
		out := make(chan int)
		go func(in <-chan int, out chan<- int) {
			for n := range in {
				out <- n + 1
			}
		}(in, out)
		in = out
	}
	return first, in
}

// request is one GET on the client's kept connection: the answer, whether it was reused, and its
// own end's address.
func request(client *http.Client, url string) string {
	var got httptrace.GotConnInfo
	trace := &httptrace.ClientTrace{GotConn: func(info httptrace.GotConnInfo) { got = info }}
	asked, err := http.NewRequest("GET", url, nil)
	if err != nil {
		return err.Error()
	}
	answer, err := client.Do(asked.WithContext(httptrace.WithClientTrace(asked.Context(), trace)))
	if err != nil {
		return err.Error()
	}
	defer answer.Body.Close()
	body, err := io.ReadAll(answer.Body)
	if err != nil {
		return err.Error()
	}
	return fmt.Sprintf("%s reused=%t from %s", body, got.Reused, got.Conn.LocalAddr())
}

func main() {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		panic(err)
	}
	handle := func(w http.ResponseWriter, r *http.Request) {
		fmt.Fprintf(w, "served %d", atomic.AddInt64(&served, 1))
	}
	server := &http.Server{
		Handler: http.HandlerFunc(handle),
		ConnState: func(_ net.Conn, state http.ConnState) {
			if state == http.StateNew {
				atomic.AddInt64(&connections, 1)
			}
		},
	}
	go server.Serve(listener)
	url := "http://" + listener.Addr().String() + "/"
	client := &http.Client{}

	in, out := ring(1000)
	var lock sync.Mutex
	held := map[string]int{}
	for i := 0; i < 3; i++ {
		go func() { // always running, with a heap that is collected
			for {
				garbage := make([]byte, 4096)
				lock.Lock()
				held["spins"] += 1 + int(garbage[0])
				lock.Unlock()
				atomic.AddInt64(&spins, 1)
				runtime.Gosched()
			}
		}()
	}
	go func() {
		for t := range time.Tick(10 * time.Millisecond) {
			ticks <- t
		}
	}()

	child := exec.Command("cat")
	toChild, _ := child.StdinPipe()
	fromChild, _ := child.StdoutPipe()
	if err := child.Start(); err != nil {
		panic(err)
	}
	echo := bufio.NewReader(fromChild)

	var kept []string // what was said before
	words := bufio.NewScanner(os.Stdin)
	for words.Scan() {
		word := words.Text()
		switch word {
		case "get":
			fmt.Println(request(client, url), "connections", atomic.LoadInt64(&connections))
		case "ring":
			in <- len(kept)
			fmt.Println(<-out)
		case "spin":
			for then := atomic.LoadInt64(&spins); atomic.LoadInt64(&spins) < then+1000; {
				time.Sleep(time.Millisecond)
			}
			lock.Lock()
			fmt.Println(held["spins"] > 1000)
			lock.Unlock()
		case "tick":
			<-ticks
			<-ticks
			select {
			case <-time.After(20 * time.Millisecond):
				fmt.Println("ticked")
			case <-time.After(time.Minute):
				fmt.Println("late")
			}
		case "child":
			fmt.Fprintf(toChild, "%d\n", len(kept))
			line, err := echo.ReadString('\n')
			fmt.Println(child.Process.Pid, strings.TrimSpace(line), err)
		case "exec":
			out, err := exec.Command("sh", "-c", "echo $((6 * 7))").Output()
			fmt.Println(strings.TrimSpace(string(out)), err)
		case "collect":
			runtime.GC()
			fmt.Println("collected")
		case "end":
			toChild.Close()
			fmt.Println(child.Wait())
			return
		default:
			kept = append(kept, word)
			fmt.Println(strings.Join(kept, " "))
		}
	}
}
