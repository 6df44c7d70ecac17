// Kernels of another machine, called by a test (`emulated.py`) as if they were in its process: this program runs under
// an emulator. It gets calls on its standard input: the address of a function and its arguments.
//
// Addresses are those of the test's memory. A page is read from there when a kernel touches it, and what the kernel has
// changed in it is written back after the call. So kernels need not say what they read and write.
#include <signal.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

namespace {

constexpr size_t PAGE = 4096, MOST_PAGES = 1 << 16, INTEGERS = 24, FLOATS = 8;

enum Word : uint64_t { READ = 1, WRITE = 2, DONE = 3 };  // what this program says first

struct Call {
  uint64_t function;
  uint64_t integers[INTEGERS];
  double floats[FLOATS];  // float32 in the lower halves, as registers have them
};

struct Touched {
  char* page;
  char* before;
};

Touched touched[MOST_PAGES];
size_t count;

void receive(void* to, size_t size) {
  for (char* at = static_cast<char*>(to); size;) {
    const ssize_t got = read(0, at, size);
    if (got <= 0) _exit(0);
    at += got, size -= static_cast<size_t>(got);
  }
}

void send(const void* from, size_t size) {
  for (const char* at = static_cast<const char*>(from); size;) {
    const ssize_t sent = write(1, at, size);
    if (sent <= 0) _exit(1);
    at += sent, size -= static_cast<size_t>(sent);
  }
}

void send_words(uint64_t first, uint64_t second, uint64_t third) {
  const uint64_t words[] = {first, second, third};
  send(words, sizeof words);
}

void* map(void* at, size_t size, int flags) {
  void* made = mmap(at, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | flags, -1, 0);
  if (made == MAP_FAILED) _exit(2);
  return made;
}

void touch(int, siginfo_t* info, void*) {
  if (count == MOST_PAGES) _exit(3);
  const uint64_t address = reinterpret_cast<uint64_t>(info->si_addr) & ~uint64_t{PAGE - 1};
  send_words(READ, address, PAGE);
  Touched& page = touched[count++];
  page.page = static_cast<char*>(map(reinterpret_cast<void*>(address), PAGE, MAP_FIXED));
  page.before = static_cast<char*>(map(nullptr, PAGE, 0));
  receive(page.before, PAGE);
  memcpy(page.page, page.before, PAGE);
}

// Only the bytes that differ: what lies beside them is the test's, which has gone on.
void send_changes(const Touched& page) {
  for (size_t first = 0; first < PAGE;) {
    if (page.page[first] == page.before[first]) {
      ++first;
      continue;
    }
    size_t last = first;
    while (last < PAGE && page.page[last] != page.before[last]) ++last;
    send_words(WRITE, reinterpret_cast<uint64_t>(page.page) + first, last - first);
    send(page.page + first, last - first);
    first = last;
  }
}

}  // namespace

int main() {
  struct sigaction action {};
  action.sa_sigaction = touch;
  action.sa_flags = SA_SIGINFO;
  sigaction(SIGSEGV, &action, nullptr);
  for (;;) {
    Call call;
    receive(&call, sizeof call);
    const uint64_t* i = call.integers;
    const double* f = call.floats;
    // Integers and numbers have registers of their own, and integers that have none follow on the stack.
    reinterpret_cast<void (*)(uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                              uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t,
                              uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, uint64_t, double, double, double, double,
                              double, double, double, double)>(call.function)(
        i[0], i[1], i[2], i[3], i[4], i[5], i[6], i[7], i[8], i[9], i[10], i[11], i[12], i[13], i[14], i[15], i[16],
        i[17], i[18], i[19], i[20], i[21], i[22], i[23], f[0], f[1], f[2], f[3], f[4], f[5], f[6], f[7]);
    for (size_t at = 0; at < count; ++at) {
      send_changes(touched[at]);
      munmap(touched[at].page, PAGE);
      munmap(touched[at].before, PAGE);
    }
    count = 0;
    send_words(DONE, 0, 0);
  }
}
