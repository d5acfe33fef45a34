/*
 * The outside world of network="nat": one process carries the packets of one network namespace.
 *
 * A namespace has a tap device; what the sandbox sends comes out of its descriptor as Ethernet
 * frames, and libslirp turns them into ordinary sockets of this process, as QEMU's user network
 * does: no address, route or firewall rule of the host is touched, and nothing but open sockets
 * exists outside. See network.py for why this and not one of the ready programs.
 *
 *     _nat UID     descriptor 3 is a seqpacket socket. Says "ok" or why it cannot, then drops to
 *                  UID. Each message brings a tap and a link; a child carries that tap until the
 *                  other end of the link is closed. At the end of the socket it waits for its
 *                  children and ends. Nobody has to send a signal, so nothing is left behind when
 *                  the keeper is killed.
 *     _nat --check says whether libslirp can be loaded, on standard output.
 *
 * libslirp is loaded at run time and its part that we use is declared here: who does not want this
 * network need not have it, neither to build nor to run. The structures are those of its version 1
 * configuration, which every libslirp.so.0 since 4.1 understands (libslirp.h).
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { CONTROL = 3 };

/* What one sandbox may cost the host: connections at once, and bytes for their buffers. */
enum { SOCKETS = 2048, MEMORY = 768 << 20 };

/* network.py has the same numbers. */
enum { MTU = 65520, HEADER = 14 };
#define NETWORK 0x0a000200 /* 10.0.2.0/24 */
#define NETMASK 0xffffff00
#define GATEWAY 0x0a000202
#define RESOLVER 0x0a000203
#define GUEST 0x0a00020f

/* --- libslirp.h ------------------------------------------------------------------------------ */

typedef struct Slirp Slirp;

struct callbacks {
    ssize_t (*send_packet)(const void *frame, size_t size, void *opaque);
    void (*guest_error)(const char *message, void *opaque);
    int64_t (*clock_get_ns)(void *opaque);
    void *(*timer_new)(void (*call)(void *), void *argument, void *opaque);
    void (*timer_free)(void *timer, void *opaque);
    void (*timer_mod)(void *timer, int64_t when, void *opaque);
    void (*register_poll_fd)(int fd, void *opaque);
    void (*unregister_poll_fd)(int fd, void *opaque);
    void (*notify)(void *opaque);
};

struct config {
    uint32_t version;
    int restricted;
    bool in_enabled;
    struct in_addr vnetwork, vnetmask, vhost;
    bool in6_enabled;
    struct in6_addr vprefix_addr6;
    uint8_t vprefix_len;
    struct in6_addr vhost6;
    const char *vhostname, *tftp_server_name, *tftp_path, *bootfile;
    struct in_addr vdhcp_start, vnameserver;
    struct in6_addr vnameserver6;
    const char **vdnssearch;
    const char *vdomainname;
    size_t if_mtu, if_mru;
    bool disable_host_loopback, enable_emu;
};

enum { IN = 1, OUT = 2, PRI = 4, ERR = 8, HUP = 16 };

static struct {
    Slirp *(*new)(const struct config *, const struct callbacks *, void *opaque);
    void (*cleanup)(Slirp *);
    void (*fill)(Slirp *, uint32_t *timeout, int (*add)(int, int, void *), void *opaque);
    void (*poll)(Slirp *, int failed, int (*found)(int, void *), void *opaque);
    void (*input)(Slirp *, const uint8_t *frame, int size);
    const char *(*version)(void);
} slirp;

static const char *load(void)
{
    static const struct {
        const char *name;
        void *at;
    } wanted[] = {
        {"slirp_new", &slirp.new},
        {"slirp_cleanup", &slirp.cleanup},
        {"slirp_pollfds_fill", &slirp.fill},
        {"slirp_pollfds_poll", &slirp.poll},
        {"slirp_input", &slirp.input},
        {"slirp_version_string", &slirp.version},
    };
    void *library = dlopen("libslirp.so.0", RTLD_NOW);

    if (!library)
        return dlerror();
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        void *symbol = dlsym(library, wanted[i].name);

        if (!symbol)
            return dlerror();
        memcpy(wanted[i].at, &symbol, sizeof symbol);
    }
    return NULL;
}

/* --- one namespace --------------------------------------------------------------------------- */

static int tap;
static struct pollfd *polled; /* the tap, the link, then libslirp's */
static int polled_count, polled_room;

static ssize_t send_packet(const void *frame, size_t size, void *opaque)
{
    (void)opaque;
    /* What does not fit (or meets an interface that is down) is lost, as on any wire. */
    ssize_t written = write(tap, frame, size);
    return written < 0 ? (ssize_t)size : written;
}

static void guest_error(const char *message, void *opaque)
{
    (void)message, (void)opaque; /* the sandbox's own affair */
}

static int64_t clock_get_ns(void *opaque)
{
    struct timespec now;

    (void)opaque;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

/* Timers are for router advertisements, and there is no IPv6: none is ever asked for. */
static void *timer_new(void (*call)(void *), void *argument, void *opaque)
{
    (void)call, (void)argument, (void)opaque;
    abort();
}

static void timer_free(void *timer, void *opaque)
{
    (void)timer, (void)opaque;
    abort();
}

static void timer_mod(void *timer, int64_t when, void *opaque)
{
    (void)timer, (void)when, (void)opaque;
    abort();
}

/* poll(2) is given everything afresh each time, by the thread that libslirp runs in. */
static void poll_fd(int fd, void *opaque)
{
    (void)fd, (void)opaque;
}

static void notify(void *opaque)
{
    (void)opaque;
}

static int add_poll(int fd, int events, void *opaque)
{
    (void)opaque;
    if (polled_count == polled_room) {
        polled_room = polled_room ? 2 * polled_room : 64;
        polled = realloc(polled, polled_room * sizeof *polled);
        if (!polled)
            abort();
    }
    polled[polled_count] = (struct pollfd){
        .fd = fd,
        .events = (events & IN ? POLLIN : 0) | (events & OUT ? POLLOUT : 0) |
                  (events & PRI ? POLLPRI : 0),
    };
    return polled_count++;
}

static int found(int index, void *opaque)
{
    int events = polled[index].revents;

    (void)opaque;
    return (events & POLLIN ? IN : 0) | (events & POLLOUT ? OUT : 0) |
           (events & POLLPRI ? PRI : 0) | (events & POLLERR ? ERR : 0) |
           (events & POLLHUP ? HUP : 0);
}

/*
 * Whether a frame may go out. libslirp connects to whatever address a packet names, and root of
 * the sandbox may route any address to the tap: 127.0.0.1 would be the host's. 0.0.0.0 means the
 * same to connect(2). Link-local addresses end at the next router everywhere, and this is one:
 * they are where clouds serve a machine its credentials. Multicast ends here too.
 */
static bool may_leave(const uint8_t *frame, ssize_t size)
{
    if (size < HEADER)
        return false;
    if (frame[12] == 0x08 && frame[13] == 0x06)
        return true; /* ARP */
    if (frame[12] != 0x08 || frame[13] != 0x00 || size < HEADER + 20)
        return false;
    const uint8_t *to = frame + HEADER + 16;
    if (to[0] >= 224)
        return to[0] == 255; /* broadcast: libslirp answers DHCP itself, and drops the rest */
    return to[0] != 127 && to[0] != 0 && !(to[0] == 169 && to[1] == 254);
}

static struct in_addr address(uint32_t value)
{
    return (struct in_addr){.s_addr = htonl(value)};
}

static void carry(int link)
{
    static uint8_t frame[HEADER + 65536];
    static const struct callbacks calls = {
        .send_packet = send_packet,
        .guest_error = guest_error,
        .clock_get_ns = clock_get_ns,
        .timer_new = timer_new,
        .timer_free = timer_free,
        .timer_mod = timer_mod,
        .register_poll_fd = poll_fd,
        .unregister_poll_fd = poll_fd,
        .notify = notify,
    };
    const struct config config = {
        .version = 1,
        .in_enabled = true,
        .vnetwork = address(NETWORK),
        .vnetmask = address(NETMASK),
        .vhost = address(GATEWAY),
        .vdhcp_start = address(GUEST),
        .vnameserver = address(RESOLVER),
        .if_mtu = MTU,
        .if_mru = MTU,
        .disable_host_loopback = true,
    };
    Slirp *stack = slirp.new(&config, &calls, NULL);

    if (!stack)
        return;
    for (;;) {
        uint32_t timeout = UINT32_MAX;
        int ready;

        polled_count = 0;
        add_poll(tap, IN, NULL);
        add_poll(link, IN, NULL);
        slirp.fill(stack, &timeout, add_poll, NULL);
        ready = poll(polled, polled_count, timeout > INT_MAX ? -1 : (int)timeout);
        if (ready < 0 && errno != EINTR)
            break;
        slirp.poll(stack, ready < 0, found, NULL);
        if (ready <= 0)
            continue;
        if (polled[1].revents)
            break; /* the keeper has let go of this network */
        if (!polled[0].revents)
            continue;
        for (int burst = 0; burst < 64; burst++) {
            ssize_t size = read(tap, frame, sizeof frame);

            if (size < 0 && errno == EAGAIN)
                break;
            if (size < 0 && errno != EINTR)
                goto gone; /* the device has been deleted */
            if (size > 0 && may_leave(frame, size))
                slirp.input(stack, frame, size);
        }
    }
gone:
    slirp.cleanup(stack); /* closes every socket: outside, the connections end */
}

/* --- the process that makes them ------------------------------------------------------------- */

static void limit(int what, rlim_t most)
{
    struct rlimit now;

    getrlimit(what, &now);
    if (now.rlim_max < most)
        most = now.rlim_max;
    setrlimit(what, &(struct rlimit){most, most});
}

static const char *drop(uid_t id)
{
    int null = open("/dev/null", O_RDWR | O_CLOEXEC);

    signal(SIGCHLD, SIG_IGN); /* children are collected by the kernel */
    signal(SIGPIPE, SIG_IGN);
    for (int fd = 0; fd < 3; fd++)
        if (dup2(null, fd) < 0) /* what a sandbox's packets make glib say fills no file */
            return "dup2";
    if (null > 3)
        close(null);
    limit(RLIMIT_NOFILE, SOCKETS);
    limit(RLIMIT_DATA, MEMORY);
    limit(RLIMIT_CORE, 0);
    if (setgroups(0, NULL) || setresgid(id, id, id) || setresuid(id, id, id))
        return "setuid";
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
        return "no_new_privs";
    return NULL;
}

static bool receive(int *new_tap, int *link)
{
    union {
        char room[CMSG_SPACE(2 * sizeof(int))];
        struct cmsghdr align;
    } control;
    char byte;
    struct iovec piece = {&byte, 1};
    struct msghdr message = {
        .msg_iov = &piece,
        .msg_iovlen = 1,
        .msg_control = &control,
        .msg_controllen = sizeof control,
    };
    ssize_t size;

    do
        size = recvmsg(CONTROL, &message, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    if (size <= 0)
        return false;
    struct cmsghdr *sent = CMSG_FIRSTHDR(&message);
    if (!sent || sent->cmsg_len != CMSG_LEN(2 * sizeof(int)))
        return false;
    memcpy(new_tap, CMSG_DATA(sent), sizeof(int));
    memcpy(link, CMSG_DATA(sent) + sizeof(int), sizeof(int));
    return true;
}

int main(int count, char **arguments)
{
    const char *wrong = load();

    if (count == 2 && !strcmp(arguments[1], "--check")) {
        puts(wrong ? wrong : slirp.version());
        return wrong != NULL;
    }
    if (count != 2) {
        fputs("usage: _nat UID | --check\n", stderr);
        return 2;
    }
    if (!wrong)
        wrong = drop(strtoul(arguments[1], NULL, 10));
    if (!wrong)
        wrong = "ok";
    if (send(CONTROL, wrong, strlen(wrong), MSG_NOSIGNAL) < 0 || strcmp(wrong, "ok"))
        return 1;

    pid_t self = getpid();
    int link;
    while (receive(&tap, &link)) {
        if (fork() == 0) {
            prctl(PR_SET_PDEATHSIG, SIGKILL, 0, 0, 0);
            if (getppid() != self)
                return 1;
            close(CONTROL);
            carry(link);
            return 0;
        }
        /* where fork failed the keeper sees the link end */
        close(tap);
        close(link);
    }
    while (wait(NULL) > 0 || errno == EINTR)
        ;
    return 0;
}
