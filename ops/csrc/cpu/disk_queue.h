// Requests of a disk engine: their order, the pieces that they are cut into, and what becomes of each. No I/O in here.
//
// A request that shares a block with an unfinished one of its file, where either writes, waits for it ("order"). The
// others are cut into pieces in the order in which they came. What lies at whole blocks in file and memory goes straight
// from and to that memory; else a piece goes through a buffer of whole blocks, of which the ends are read before a write.

#pragma once

#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <unordered_map>
#include <vector>

namespace shardlight::disk {

constexpr uint64_t kBlock = 4096;          // as BLOCK_BYTES in ops/disk.py
constexpr uint64_t kBuffered = 1 << 20;    // the largest piece that goes through a buffer
constexpr int kTries = 1000;               // of one I/O that the system puts off, a millisecond apart

inline uint64_t below(uint64_t at) { return at / kBlock * kBlock; }
inline uint64_t above(uint64_t at) { return (at + kBlock - 1) / kBlock * kBlock; }

// As `Fault` in ops/disk.py. `what` is the system call, or one of the last two.
enum What : int32_t { kRead, kWrite, kTooShort, kAfterFailure };
struct Fault {
    int32_t error = 0;  // errno; 0: none
    int32_t what = 0;
    int64_t file = 0;
    uint64_t offset = 0, bytes = 0;  // of the request
    uint64_t size = 0;               // the file's, where it is too short
};

struct Request;
struct File {
    int64_t number;
    int fd;
    bool direct;  // I/O of whole blocks only
    bool closed = false;
    std::vector<Request*> open;  // requests that are not finished, in order
};

struct Request {
    uint64_t number;
    File* file;
    bool write;
    char* memory;
    uint64_t offset, end;
    uint64_t next;                // what is before it is cut into pieces
    int in_flight = 0;            // pieces
    int before = 0;               // requests that have to finish first
    std::vector<Request*> after;  // those that wait for this one
    Fault fault;
    bool begun = false, finished = false, released = false, told = false;

    Request(uint64_t given, File* of, bool writes, char* at, uint64_t from, uint64_t bytes)
        : number(given), file(of), write(writes), memory(at), offset(from), end(from + bytes), next(from) {}

    bool shares_blocks(const Request& other) const {
        return (write || other.write) && below(offset) < above(other.end) && below(other.offset) < above(end);
    }
    Fault failed(int error, What what, uint64_t size = 0) const {
        return {error, what, file->number, offset, end - offset, size};
    }
};

inline uint64_t size_of(int fd) {
    struct stat found;
    // What is no regular file has no size to be held to.
    return fstat(fd, &found) == 0 && S_ISREG(found.st_mode) ? uint64_t(found.st_size) : UINT64_MAX;
}

// One piece under way, and the buffer that goes with its place in the queue.
struct Slot {
    Request* request = nullptr;
    uint64_t from = 0, to = 0;
    bool buffered = false;
    char* buffer = nullptr;
    size_t buffer_bytes = 0;
    enum Stage { kFresh, kFirst, kLast, kBody } stage = kFresh;
    // The I/O to do now.
    bool writing = false;
    char* at = nullptr;
    uint64_t offset = 0, left = 0;
    int tries = 0;
    uint64_t bytes_read = 0, bytes_written = 0;
    Fault fault;

    Slot() = default;
    Slot(const Slot&) = delete;
    ~Slot() { std::free(buffer); }

    // Sets the next I/O. False: there is none, the piece is over.
    bool advance() {
        const Request& r = *request;
        if (!buffered) {
            if (stage == kBody) return false;
            return io(kBody, r.write, r.memory + (from - r.offset), from, to - from);
        }
        const uint64_t first = below(from), last = above(to);
        const bool one = last - first == kBlock;
        if (stage == kFresh && !room(last - first)) return false;
        if (!r.write) {
            if (stage == kFresh) return io(kBody, false, buffer, first, last - first);
            std::memcpy(r.memory + (from - r.offset), buffer + (from - first), to - from);
            return false;
        }
        if (stage == kFresh && (from != first || (one && to != last))) return io(kFirst, false, buffer, first, kBlock);
        if (stage < kLast && !one && to != last)
            return io(kLast, false, buffer + (last - first - kBlock), last - kBlock, kBlock);
        if (stage == kBody) return false;
        std::memcpy(buffer + (from - first), r.memory + (from - r.offset), to - from);
        return io(kBody, true, buffer, first, last - first);
    }

    // Takes what the system said of the I/O: bytes, or -errno. False: the piece is over; else there is I/O to do.
    bool took(int64_t result) {
        if (result == -EINTR || result == -EAGAIN) {
            if (++tries > kTries) return fail(int(-result));
            if (result == -EAGAIN) usleep(1000);
            return true;
        }
        if (result < 0) return fail(int(-result));
        // Direct I/O goes on at a whole block only.
        uint64_t done = std::min(uint64_t(result), left);
        if (request->file->direct && done < left) done = below(done);
        if (!done) {
            const uint64_t size = size_of(request->file->fd);
            if (!writing && size < offset + left) {
                fault = request->failed(EIO, kTooShort, size);
                return false;
            }
            return ++tries <= kTries / 10 || fail(EIO);
        }
        (writing ? bytes_written : bytes_read) += done;
        at += done, offset += done, left -= done, tries = 0;
        return left || advance();
    }

  private:
    bool io(Stage next, bool write, char* memory, uint64_t where, uint64_t bytes) {
        stage = next, writing = write, at = memory, offset = where, left = bytes, tries = 0;
        return true;
    }
    bool fail(int error) {
        fault = request->failed(error, writing ? kWrite : kRead);
        return false;
    }
    bool room(size_t bytes) {
        if (bytes <= buffer_bytes) return true;
        std::free(buffer);
        buffer_bytes = 0;
        buffer = static_cast<char*>(std::aligned_alloc(kBlock, bytes));
        if (!buffer) return fail(ENOMEM);
        buffer_bytes = bytes;
        return true;
    }
};

// All that requests share. Its functions want `mutex` held, but for those of waiting.
class Queue {
  public:
    std::mutex mutex;
    uint64_t bytes_read = 0, bytes_written = 0;
    int in_flight = 0;  // pieces
    int frozen = 0;     // no piece begins while it is not 0
    bool stopping = false;

    explicit Queue(uint64_t piece) : piece_(piece) {}

    int64_t add_file(int fd, bool direct) {
        const int64_t number = ++files_made_;
        files_[number] = std::unique_ptr<File>(new File{number, fd, direct, false, {}});
        return number;
    }

    // The file goes with its last request.
    void close_file(int64_t number) {
        const auto found = files_.find(number);
        if (found == files_.end()) return;
        found->second->closed = true;
        drop(found->second.get());
    }

    void close_files() {
        std::vector<int64_t> numbers;
        for (const auto& [number, file] : files_) numbers.push_back(number);
        for (int64_t number : numbers) close_file(number);
    }

    bool add(uint64_t number, int64_t file, bool write, char* memory, uint64_t offset, uint64_t bytes) {
        const auto found = files_.find(file);
        if (stopping || found == files_.end() || found->second->closed) return false;
        File* of = found->second.get();
        auto made = std::make_unique<Request>(number, of, write, memory, offset, bytes);
        for (Request* earlier : of->open)
            if (made->shares_blocks(*earlier)) earlier->after.push_back(made.get()), ++made->before;
        of->open.push_back(made.get());
        if (!made->before) ready_.push_back(made.get());
        ++open_;
        requests_[number] = std::move(made);
        return true;
    }

    bool has_work() const { return !frozen && !ready_.empty(); }

    // Gives a slot the next piece. False: there is none now.
    bool take(Slot& slot) {
        while (has_work()) {
            Request* r = ready_.front();
            if (!r->begun) {
                r->begun = true;
                const uint64_t size = size_of(r->file->fd);
                if (size < r->end) {
                    fail(r, r->failed(EIO, kTooShort, size));
                    continue;
                }
            }
            slot.request = r, slot.from = r->next, slot.stage = Slot::kFresh, slot.fault = {};
            slot.bytes_read = slot.bytes_written = 0;
            slot.to = cut(*r, slot.buffered);
            r->next = slot.to;
            if (r->next == r->end) ready_.pop_front();
            ++r->in_flight, ++in_flight;
            return true;
        }
        return false;
    }

    // A piece is over.
    void give_back(Slot& slot) {
        Request* r = slot.request;
        bytes_read += slot.bytes_read, bytes_written += slot.bytes_written;
        --r->in_flight;
        if (!--in_flight && frozen) changed_.notify_all();
        if (slot.fault.error)
            fail(r, slot.fault);
        else if (!r->in_flight && r->next == r->end)
            finish(r);
        slot.request = nullptr;
    }

    // --- for those who wait

    // Whether it came true in time.
    template <class Condition> bool wait(std::unique_lock<std::mutex>& lock, int64_t timeout_us, Condition condition) {
        return changed_.wait_for(lock, std::chrono::microseconds(timeout_us), condition);
    }
    bool finished(uint64_t number) const {
        const auto found = requests_.find(number);
        return found == requests_.end() || found->second->finished;
    }
    // 0: all files.
    bool idle(int64_t file) const {
        const auto found = files_.find(file);
        return file ? found == files_.end() || found->second->open.empty() : !open_;
    }
    Fault fault_of(uint64_t number) {
        const auto found = requests_.find(number);
        if (found == requests_.end()) return {};
        found->second->told = true;
        return found->second->fault;
    }
    // A fault that nobody was told of. Of a file; 0: of all.
    Fault lost(int64_t file) {
        for (auto at = lost_.begin(); at != lost_.end(); ++at)
            if (!file || at->file == file) {
                const Fault found = *at;
                lost_.erase(at);
                return found;
            }
        Request* first = nullptr;
        for (const auto& [number, r] : requests_)
            if (r->fault.error && r->finished && !r->told && (!file || r->fault.file == file))
                if (!first || number < first->number) first = r.get();
        return first ? fault_of(first->number) : Fault{};
    }
    // Nobody will ask for it any more. Whether its memory is free.
    bool release(uint64_t number) {
        const auto found = requests_.find(number);
        if (found == requests_.end()) return true;
        found->second->released = true;
        if (!found->second->finished) return false;
        forget(found->second.get());
        return true;
    }

  private:
    uint64_t piece_;
    int64_t files_made_ = 0;
    uint64_t open_ = 0;
    std::unordered_map<int64_t, std::unique_ptr<File>> files_;
    std::unordered_map<uint64_t, std::unique_ptr<Request>> requests_;
    std::deque<Request*> ready_;  // those that may begin and are not all cut
    std::deque<Fault> lost_;
    std::condition_variable changed_;

    // Where the next piece of a request ends.
    uint64_t cut(const Request& r, bool& buffered) const {
        const uint64_t at = r.next;
        const auto upto = [&](uint64_t piece) { return std::min(r.end, (at / piece + 1) * piece); };
        buffered = false;
        if (!r.file->direct) return upto(piece_);
        if ((reinterpret_cast<uintptr_t>(r.memory) - r.offset) % kBlock == 0) {
            if (at % kBlock == 0 && r.end - at >= kBlock) return std::min(below(r.end), upto(piece_));
            buffered = true;
            return upto(kBlock);
        }
        buffered = true;
        return upto(std::min(piece_, kBuffered));
    }

    void fail(Request* r, const Fault& fault) {
        if (!r->fault.error) r->fault = fault;
        const auto found = std::find(ready_.begin(), ready_.end(), r);
        if (found != ready_.end()) ready_.erase(found);
        r->next = r->end;
        if (!r->in_flight) finish(r);
    }

    void finish(Request* first) {
        std::deque<Request*> over{first};
        for (; !over.empty(); over.pop_front()) {
            Request* r = over.front();
            auto& open = r->file->open;
            open.erase(std::find(open.begin(), open.end(), r));
            for (Request* later : r->after) {
                // What was to be written is not there to be read.
                if (r->fault.error && r->write && !later->write && !later->fault.error)
                    later->fault = later->failed(r->fault.error, kAfterFailure);
                if (--later->before) continue;
                if (later->fault.error)
                    later->next = later->end, over.push_back(later);
                else
                    ready_.push_back(later);
            }
            r->finished = true;
            --open_;
            drop(r->file);
            if (r->released) forget(r);
        }
        changed_.notify_all();
    }

    void forget(Request* r) {
        if (r->fault.error && !r->told) lost_.push_back(r->fault);
        requests_.erase(r->number);
    }

    void drop(File* file) {
        if (!file->closed || !file->open.empty()) return;
        ::close(file->fd);
        files_.erase(file->number);
    }
};

}  // namespace shardlight::disk
