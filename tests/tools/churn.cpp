// Threads that allocate, check and free without end, through whatever malloc there is.
//
// Every block holds bytes that only its address in the order of allocations tells, and every
// thread draws its own numbers: what comes out is the same with each run and each allocator.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

struct Chance {
    uint64_t state;
    uint64_t next() {
        state ^= state << 13, state ^= state >> 7, state ^= state << 17;
        return state;
    }
};

struct Block {
    unsigned char *data = nullptr;
    size_t size = 0;
    unsigned char seed = 0;

    void fill() {
        for (size_t i = 0; i < size; i += 61) data[i] = (unsigned char)(seed + i / 61);
    }
    void check() const {
        for (size_t i = 0; i < size; i += 61)
            if (data[i] != (unsigned char)(seed + i / 61)) {
                printf("a block of %zu bytes is wrong at %zu\n", size, i);
                abort();
            }
    }
};

static std::mutex handing;
static std::vector<Block> handed;  // freed by other threads than they were allocated by
static uint64_t sums[16];

static void work(int number, int operations) {
    Chance chance{0x9e3779b97f4a7c15u * (number + 1)};
    std::vector<Block> blocks(400);
    std::unordered_map<std::string, std::shared_ptr<std::string>> names;
    uint64_t sum = 0;
    for (int turn = 0; turn < operations; turn++) {
        Block &block = blocks[chance.next() % blocks.size()];
        uint64_t what = chance.next();
        if (block.data) {
            block.check();
            sum = sum * 31 + block.size + block.seed;
        }
        if (block.data && what % 4 == 0) {  // grow or shrink in place or elsewhere
            size_t size = 1 + what / 7 % (2 * block.size);
            block.data = (unsigned char *)realloc(block.data, size);
            size_t kept = size < block.size ? size : block.size;
            Block{block.data, kept, block.seed}.check();
            block.size = size;
        } else {
            if (block.data && what % 4 == 1) {
                std::lock_guard<std::mutex> guard(handing);
                handed.push_back(block);
                if (handed.size() > 64) {
                    handed.front().check();
                    free(handed.front().data);
                    handed.erase(handed.begin());
                }
            } else {
                free(block.data);
            }
            // mostly small, some of many pages
            block.size = 1 + what / 7 % (what % 97 == 0 ? 1 << 20 : what % 13 == 0 ? 40000 : 600);
            block.data = (unsigned char *)malloc(block.size);
        }
        block.seed = (unsigned char)what;
        block.fill();
        std::string name = std::to_string(what % 500);
        names[name] = std::make_shared<std::string>(name + std::string(what % 200, 'x'));
        if (what % 3 == 0) names.erase(std::to_string(what / 5 % 500));
    }
    for (Block &block : blocks) {
        if (block.data) block.check();
        free(block.data);
    }
    for (auto &[name, value] : names) sum += name.size() * value->size();
    sums[number] = sum;
}

int main(int, char **words) {
    int threads = atoi(words[1]), operations = atoi(words[2]);
    auto control = (int (*)(const char *, void *, size_t *, void *, size_t))dlsym(RTLD_DEFAULT,
                                                                                 "mallctl");
    unsigned arenas = 0;
    size_t size = sizeof arenas;
    if (control) control("opt.narenas", &arenas, &size, nullptr, 0);
    printf("%u arenas\n", arenas);
    fflush(stdout);
    std::vector<std::thread> running;
    for (int i = 0; i < threads; i++) running.emplace_back(work, i, operations);
    for (auto &thread : running) thread.join();
    uint64_t all = 0;
    for (uint64_t sum : sums) all = all * 31 + sum;
    printf("%016llx\n", (unsigned long long)all);
}
