// Reads and writes of memory at offsets of files that go on while the program computes: by io_uring, or by threads that
// call pread and pwrite. A plain C interface for ctypes; see ops/disk.py, which documents it. Knows no PyTorch.
//
// A queue (disk_queue.h) says which piece may begin. Each of `depth` slots has one piece under way: a slot is a thread,
// or an entry of the ring, which one thread submits and reaps.

#include <csignal>
#include <pthread.h>
#include <system_error>
#include <thread>

#include "disk_queue.h"
#include "disk_ring.h"

#if defined(SHARDLIGHT_HAS_RING)
#include <sys/eventfd.h>
#endif

using namespace shardlight::disk;

namespace {

// Faults for tests: the system's answers are changed, never what it did.
struct Spoilt {
    std::atomic<int64_t> most{INT64_MAX};  // bytes that one I/O claims to have moved
    std::atomic<int64_t> after{-1};        // I/Os until one fails
    std::atomic<int> error{0};
    int64_t of(int64_t result) {
        if (result >= 0 && after.load() >= 0 && after.fetch_sub(1) == 0) return -error.load();
        return std::min(result, most.load());
    }
};

class Engine : public Queue {
  public:
    Spoilt spoilt;

    Engine(unsigned depth, uint64_t piece) : Queue(piece), slots_(depth) {}
    virtual ~Engine() = default;
    // With the mutex held: there may be work.
    virtual void wake() = 0;
    // Ends the threads; nothing is under way.
    virtual void join() = 0;

  protected:
    std::vector<Slot> slots_;

    // Signals are for the program's own threads.
    template <class Run> static std::thread quiet_thread(Run run) {
        sigset_t all, before;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before);
        try {
            std::thread made(run);
#if defined(__linux__)
            pthread_setname_np(made.native_handle(), "shardlight-disk");
#endif
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            return made;
        } catch (...) {
            pthread_sigmask(SIG_SETMASK, &before, nullptr);
            throw;
        }
    }
};

class Threads final : public Engine {
  public:
    using Engine::Engine;

    // The first thread; the others come when there is work for them, or, where the system gives no more, do not.
    int start() {
        try {
            add_thread();
            return 0;
        } catch (const std::system_error& refused) {
            return refused.code().value();
        }
    }
    // Each thread that finds a piece wakes the next.
    void wake() override {
        if (stopping) return work_.notify_all();
        if (!has_work()) return;
        if (idle_ || threads_.size() == slots_.size()) return work_.notify_one();
        try {
            add_thread();
        } catch (const std::system_error&) {
        }
    }
    void join() override {
        for (std::thread& each : threads_) each.join();
        threads_.clear();
    }

  private:
    std::vector<std::thread> threads_;
    std::condition_variable work_;
    size_t idle_ = 0;

    void add_thread() {
        Slot& slot = slots_[threads_.size()];
        threads_.push_back(quiet_thread([this, &slot] { run(slot); }));
        ++idle_;
    }

    void run(Slot& slot) {
        std::unique_lock<std::mutex> lock(mutex);
        while (true) {
            work_.wait(lock, [this] { return stopping || has_work(); });
            if (!has_work() && stopping) return;
            --idle_;
            while (take(slot)) {
                wake();  // there may be more
                lock.unlock();
                const int fd = slot.request->file->fd;
                for (bool more = slot.advance(); more;) {
                    const ssize_t result = slot.writing ? pwrite(fd, slot.at, slot.left, off_t(slot.offset))
                                                        : pread(fd, slot.at, slot.left, off_t(slot.offset));
                    more = slot.took(spoilt.of(result < 0 ? -errno : result));
                }
                lock.lock();
                give_back(slot);
            }
            ++idle_;
        }
    }
};

#if defined(SHARDLIGHT_HAS_RING)

class Rings final : public Engine {
  public:
    using Engine::Engine;
    ~Rings() override {
        if (bell_ >= 0) ::close(bell_);
    }

    int start() {
        bell_ = eventfd(0, EFD_CLOEXEC);
        if (bell_ < 0) return errno;
        if (const int error = ring_.open(unsigned(slots_.size()) + 1)) return error;
        try {
            thread_ = quiet_thread([this] { run(); });
            return 0;
        } catch (const std::system_error& refused) {
            return refused.code().value();
        }
    }
    void wake() override {
        const uint64_t one = 1;
        if (asleep_ && (stopping || has_work())) asleep_ = ::write(bell_, &one, sizeof one) != sizeof one;
    }
    void join() override {
        if (thread_.joinable()) thread_.join();
    }

  private:
    static constexpr uint64_t kBell = UINT64_MAX;
    Ring ring_;
    int bell_ = -1;
    uint64_t rung_ = 0;
    bool armed_ = false;   // a read of the bell is in the ring
    bool asleep_ = false;  // or about to be, with a slot free
    std::thread thread_;

    void run() {
        std::vector<size_t> free;
        for (size_t n = slots_.size(); n--;) free.push_back(n);
        std::vector<std::pair<uint64_t, int64_t>> came;
        while (true) {
            {
                std::lock_guard<std::mutex> lock(mutex);
                asleep_ = false;
                while (!free.empty() && take(slots_[free.back()])) {
                    const size_t n = free.back();
                    free.pop_back();
                    if (slots_[n].advance())
                        push(n);
                    else
                        give_back(slots_[n]), free.push_back(n);
                }
                if (stopping && free.size() == slots_.size()) return;
                asleep_ = !free.empty();
            }
            if (!armed_) ring_.push(IORING_OP_READ, bell_, &rung_, sizeof rung_, 0, kBell), armed_ = true;
            const int error = ring_.enter(1);
            came.clear();
            if (error && error != EINTR && error != EAGAIN && error != EBUSY)
                for (uint64_t user : ring_.withdraw()) came.emplace_back(user, -error);
            if (error) usleep(error == EINTR ? 0 : 1000);
            ring_.reap([&](uint64_t user, int64_t result) { came.emplace_back(user, result); });
            for (const auto& [user, result] : came) {
                if (user == kBell) {
                    armed_ = false;
                    continue;
                }
                if (slots_[user].took(spoilt.of(result))) {
                    push(user);
                    continue;
                }
                std::lock_guard<std::mutex> lock(mutex);
                give_back(slots_[user]);
                free.push_back(user);
            }
        }
    }

    void push(size_t n) {
        const Slot& slot = slots_[n];
        const int what = slot.writing ? IORING_OP_WRITE : IORING_OP_READ;
        ring_.push(what, slot.request->file->fd, slot.at, uint32_t(slot.left), slot.offset, n);
    }
};

int ring_refused() {
    Ring tried;
    return tried.open(2);
}

#else

using Rings = Threads;
int ring_refused() { return ENOSYS; }

#endif

template <class Kind> Engine* made(unsigned depth, uint64_t piece, int* error) {
    auto made = std::make_unique<Kind>(depth, piece);
    *error = made->start();
    return *error ? nullptr : made.release();
}

using Lock = std::unique_lock<std::mutex>;

}  // namespace

extern "C" {

// Why there is no ring: an errno; 0: there is one.
int ops_disk_ring_refused() { return ring_refused(); }

// Returns an engine; null: `error` is why. `piece` is in bytes, whole blocks, at most 1 GiB.
void* ops_disk_new(int ring, int depth, uint64_t piece, int* error) {
    if (ring && (*error = ring_refused())) return nullptr;
    return ring ? made<Rings>(unsigned(depth), piece, error) : made<Threads>(unsigned(depth), piece, error);
}

// Waits for all that is under way and closes files and threads. What became of requests can be asked still.
void ops_disk_stop(void* engine) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    while (!e->wait(lock, 1000000, [e] { return e->idle(0); })) {
    }
    e->stopping = true;
    e->close_files();
    e->wake();
    lock.unlock();
    e->join();
}

void ops_disk_free(void* engine) { delete static_cast<Engine*>(engine); }

// The engine closes the descriptor. `direct`: I/O is of whole blocks only.
int64_t ops_disk_add_file(void* engine, int fd, int direct) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    return e->add_file(fd, direct != 0);
}

void ops_disk_close_file(void* engine, int64_t file) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    e->close_file(file);
}

// Returns 0, or -1 where the file is closed. The memory stays until it is finished.
int ops_disk_start(void* engine, uint64_t number, int64_t file, int write, void* memory, uint64_t offset, uint64_t bytes) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    if (!e->add(number, file, write != 0, static_cast<char*>(memory), offset, bytes)) return -1;
    e->wake();
    return 0;
}

// Returns 0 when it is finished, with what failed; 1: it is not yet.
int ops_disk_wait(void* engine, uint64_t number, int64_t timeout_us, Fault* fault) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    if (!e->wait(lock, timeout_us, [&] { return e->finished(number); })) return 1;
    *fault = e->fault_of(number);
    return 0;
}

int ops_disk_finished(void* engine, uint64_t number) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    return e->finished(number);
}

// Nobody waits for it. Returns whether its memory is free.
int ops_disk_release(void* engine, uint64_t number) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    return e->release(number);
}

// Returns 0 when nothing of a file (0: of any) is under way, with a fault that nobody was told of; 1: not yet.
int ops_disk_settle(void* engine, int64_t file, int64_t timeout_us, Fault* fault) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    if (!e->wait(lock, timeout_us, [&] { return e->idle(file); })) return 1;
    *fault = e->lost(file);
    return 0;
}

// bytes: read, written.
void ops_disk_counters(void* engine, uint64_t* bytes) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    bytes[0] = e->bytes_read, bytes[1] = e->bytes_written;
}

// Between the two nothing is under way in the system, so that the process may fork.
void ops_disk_freeze(void* engine) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    ++e->frozen;
    while (!e->wait(lock, 1000000, [e] { return !e->in_flight; })) {
    }
}
void ops_disk_thaw(void* engine) {
    auto* e = static_cast<Engine*>(engine);
    Lock lock(e->mutex);
    --e->frozen;
    e->wake();
}

// For tests; see Spoilt.
void ops_disk_spoil(void* engine, int64_t most, int64_t after, int error) {
    auto* e = static_cast<Engine*>(engine);
    e->spoilt.error = error, e->spoilt.after = after, e->spoilt.most = most;
}

}  // extern "C"
