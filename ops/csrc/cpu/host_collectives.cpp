// Collectives between the processes of one host, over memory that they share. A plain C interface for ctypes; see
// ops/host_collectives.py, which documents it. Knows no PyTorch.
//
// The shared segment holds rings of records. Each is written by one rank: what goes to everyone by one ring, what goes
// to a single rank by another.
//
//   Segment | rank 0: Desk, ring to rank 0 (which means: to all), ring to rank 1, ... | rank 1: Desk, ring to rank 0, ...
//
// A collective is a plan of what a rank sends to whom, in pieces, and what it expects from whom. Every rank starts the
// same collectives in the same order, so both are known without asking. Sending copies a piece into a ring, as soon as
// there is room; receiving copies or adds it from there, which needs no help of the sender. A rank whose program
// computes, or waits for something else, holds nobody up: a rank that has to wait calls for help, and a thread of the
// other goes on with what its program started.
//
// Each rank may also have an arena, memory of its own that the others can read. What is sent from there is not copied
// into a ring: a record says where it lies, and the sender is done when everyone has read it.

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <climits>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <deque>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "sum_parts.h"

using namespace shardlight;

namespace {

constexpr uint32_t kMagic = 0x51A4D120;
constexpr uint64_t kNothing = UINT64_MAX;  // not even a message that nothing comes
constexpr size_t kPiece = 1 << 17;
constexpr size_t kReadPiece = 1 << 20;  // of what is read where it lies
constexpr size_t kLine = 64;
constexpr int kMaxRanks = 256;

static_assert(std::atomic<uint64_t>::is_always_lock_free && std::atomic<uint32_t>::is_always_lock_free,
              "processes can share these only without locks");

// --- what is shared

struct alignas(kLine) Position {
    std::atomic<uint64_t> value;
};

struct alignas(kLine) Desk {
    std::atomic<uint32_t> bell;    // rung when something happened that the rank may wait for
    std::atomic<uint32_t> asleep;  // how many of its threads wait for the bell
    std::atomic<uint32_t> help;    // counts calls for its helper
    std::atomic<uint32_t> helper_asleep;
};

struct Ring {
    Position written;              // bytes that were put in since the start
    // followed by one Position per rank, bytes that it has read, and the bytes themselves
    Position* read_by(int reader) { return reinterpret_cast<Position*>(this + 1) + reader; }
};

struct alignas(kLine) Segment {
    uint32_t magic;
    uint32_t world;
    uint64_t ring_bytes;
};

enum Form : uint32_t { kFollows, kFiller, kInArena };

struct alignas(kLine) Record {
    uint64_t number;  // of the collective
    Form form;        // the piece follows or is in the sender's arena, or there is none up to the ring's end
    uint32_t kind;    // of the collective and its numbers, to be compared
    uint64_t total;   // bytes of this collective for the reader
    uint64_t bytes;   // that follow
    uint64_t length;  // of the piece
    uint64_t place;   // in the arena
};

size_t rounded(size_t bytes) { return (bytes + kLine - 1) / kLine * kLine; }

// What the sizes of a segment follow from: a ring to all holds as much as the others of a rank together.
struct Sizes {
    size_t world, to_all, to_one, piece;
    Sizes(int ranks, size_t bytes) : world(ranks), to_all(bytes), to_one(bytes / (ranks > 1 ? ranks - 1 : 1) / kLine * kLine) {
        piece = to_one / 4 < kPiece ? to_one / 4 / kLine * kLine : kPiece;
    }
    size_t ring(bool all) const { return all ? to_all : to_one; }
    size_t ring_bytes(bool all) const { return sizeof(Ring) + world * sizeof(Position) + ring(all); }
    size_t rank_bytes() const { return sizeof(Desk) + ring_bytes(true) + (world - 1) * ring_bytes(false); }
    size_t bytes() const { return sizeof(Segment) + world * rank_bytes(); }
};

// --- what a rank does

struct Collective {
    uint64_t number;
    uint32_t kind;
    bool to_all = false;                          // everyone gets the same: it is written once
    std::vector<const char*> out;                 // what each rank gets from this one
    std::vector<uint64_t> out_bytes, sent;
    std::vector<char*> in;                        // where what comes from each rank belongs
    std::vector<uint64_t> in_bytes, received;
    Sum sum = nullptr;                            // set: what comes is added up instead
    size_t from_width = 1, to_width = 1;
    const char* own = nullptr;                    // this rank's part of the sum
    char* result = nullptr;
    uint64_t summed = 0;
    bool add = false;
    std::vector<uint64_t> taken;                  // of the piece at hand from each rank, where sums are cut differently
    std::vector<uint64_t> end;                    // of each ring after the last record of something in the arena
    bool all_sent = false, all_received = false, all_read = true;
    std::vector<bool> announced, heard;           // a first record goes to, and comes from, everyone concerned
    bool done() const { return all_sent && all_received && all_read; }
};

struct Group {
    std::mutex mutex;
    char* base;
    Sizes sizes;
    int rank, world, spins;
    uint64_t started = 0, finished = 0;
    std::deque<Collective> open;  // in order; those in front that are done are dropped
    uint64_t error = 0;           // 1 + the rank that does something else
    std::thread helper;
    bool stopping = false;
    std::vector<const char*> arena;   // of each rank, as it is seen here; null: none
    std::vector<uint64_t> arena_bytes;
    std::vector<bool> mapped_here;
    uint64_t read_from = UINT64_MAX;  // bytes; less is copied, since a sender need not wait for readers then

    Group(char* at, Sizes found, int own, int spinning)
        : base(at), sizes(found), rank(own), world(int(found.world)), spins(spinning),
          arena(found.world, nullptr), arena_bytes(found.world, 0), mapped_here(found.world, false) {}

    Desk* desk(int of) const { return reinterpret_cast<Desk*>(base + sizeof(Segment) + of * sizes.rank_bytes()); }

    // From a rank to another; to itself means: to all.
    Ring* ring(int from, int to) const {
        char* at = reinterpret_cast<char*>(desk(from) + 1);
        at += size_t(to) * sizes.ring_bytes(false);
        if (to > from) at += sizes.ring_bytes(true) - sizes.ring_bytes(false);
        return reinterpret_cast<Ring*>(at);
    }
    char* data(Ring* ring) const { return reinterpret_cast<char*>(ring->read_by(world)); }

    void ring_bell(int of) {
        Desk* at = desk(of);
        at->bell.fetch_add(1);
        if (at->asleep.load()) syscall(SYS_futex, &at->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    void call_helper(int of) {
        Desk* at = desk(of);
        at->help.fetch_add(1);
        if (at->helper_asleep.load()) syscall(SYS_futex, &at->help, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    }

    // How far everyone concerned has read a ring of this rank.
    uint64_t read_by_all(Ring* mine, int to) const {
        if (to != rank) return mine->read_by(to)->value.load(std::memory_order_acquire);
        uint64_t least = UINT64_MAX;
        for (int r = 0; r < world; ++r)
            if (r != rank) {
                uint64_t at = mine->read_by(r)->value.load(std::memory_order_acquire);
                if (at < least) least = at;
            }
        return least;
    }

    // Returns where a record of `payload` bytes can be written, nullptr while there is no room.
    char* room(Ring* mine, int to, size_t payload, uint64_t* after) {
        size_t size = sizes.ring(to == rank);
        uint64_t written = mine->written.value.load(std::memory_order_relaxed);
        uint64_t needed = sizeof(Record) + rounded(payload), oldest = read_by_all(mine, to), place = written % size;
        // An empty ring is filled from its start, whose memory is the one that caches hold.
        bool whole = place + needed <= size, again = oldest == written && place != 0;
        uint64_t filler = !whole || again ? size - place : 0;
        if (filler && written + filler + needed - oldest > size && whole) filler = 0;
        if (written + filler + needed - oldest > size) return nullptr;
        if (filler) {
            Record* record = reinterpret_cast<Record*>(data(mine) + place);
            record->form = kFiller;
            record->bytes = filler - sizeof(Record);
            written += filler;
            place = 0;
        }
        *after = written + needed;
        return data(mine) + place;
    }

    // Sends the next piece to a rank, or to all, of what `target` gets.
    bool send_piece(Collective& c, int target, int to) {
        Ring* mine = ring(rank, to);
        const char* from = c.out[target] + c.sent[target];
        const bool shared = in_arena(c.out[target], c.out_bytes[target]);
        const uint64_t most = shared ? kReadPiece : sizes.piece;
        uint64_t left = c.out_bytes[target] - c.sent[target], length = left < most ? left : most, after;
        char* place = room(mine, to, shared ? 0 : length, &after);
        if (!place) return false;
        Record* record = reinterpret_cast<Record*>(place);
        *record = Record{c.number, kFollows, c.kind, c.out_bytes[target], length, length, 0};
        if (shared) {
            record->form = kInArena, record->bytes = 0, record->place = uint64_t(from - arena[rank]);
            c.all_read = false, c.end[to] = after;
        } else if (length) {
            std::memcpy(record + 1, from, length);
        }
        c.sent[target] += length;
        c.announced[target] = true;
        mine->written.value.store(after, std::memory_order_release);
        for (int r = 0; r < world; ++r)
            if (r != rank && (to == rank || to == r)) ring_bell(r);
        return true;
    }

    // Whether others are to read something where it lies.
    bool in_arena(const char* at, uint64_t bytes) const {
        const char* own = arena[rank];
        return own && bytes >= read_from && at >= own && at + bytes <= own + arena_bytes[rank];
    }

    // Whether a rank has read everything of a collective that is in this one's arena.
    bool has_read(const Collective& c, int r) const {
        int to = c.to_all ? rank : r;
        return r == rank || ring(rank, to)->read_by(r)->value.load() >= c.end[to];
    }

    bool sends(const Collective& c, int target) const {
        return target != rank && c.out[target] && (c.sent[target] < c.out_bytes[target] || !c.announced[target]);
    }

    // Returns whether something was sent.
    bool send(Collective& c) {
        bool any = false;
        if (c.to_all) {
            int first = rank == 0 ? 1 : 0;
            while (sends(c, first)) {
                if (!send_piece(c, first, rank)) return any;
                any = true;
            }
        } else {
            bool full = false;
            // A piece to everyone, then the next; ranks begin with different ones.
            for (bool again = true; again;) {
                again = false;
                for (int i = 1; i < world; ++i) {
                    int r = (rank + i) % world;
                    if (!sends(c, r)) continue;
                    if (send_piece(c, r, r)) again = any = true;
                    else full = true;
                }
            }
            if (full) return any;
        }
        c.all_sent = true;
        return any;
    }

    // Returns the next record in a ring; nullptr: there is none yet.
    Record* next(const Collective& c, int from) {
        Ring* theirs = ring(from, c.to_all ? from : rank);
        for (;;) {
            uint64_t position = theirs->read_by(rank)->value.load(std::memory_order_relaxed);
            if (position >= theirs->written.value.load(std::memory_order_acquire)) return nullptr;
            Record* record = reinterpret_cast<Record*>(data(theirs) + position % sizes.ring(c.to_all));
            if (record->form != kFiller) return record;
            consume(c, from, record);
        }
    }

    void consume(const Collective& c, int from, const Record* record) {
        Position* at = ring(from, c.to_all ? from : rank)->read_by(rank);
        uint64_t position = at->value.load(std::memory_order_relaxed) + sizeof(Record) + rounded(record->bytes);
        // Ordered before the look at `asleep`.
        at->value.store(position, std::memory_order_seq_cst);
        if (desk(from)->asleep.load()) ring_bell(from);
    }

    // Returns where the piece of a record is; null: in an arena that it does not fit into.
    const char* piece(int from, const Record* record) {
        if (record->form == kFollows) return reinterpret_cast<const char*>(record + 1);
        if (arena[from] && record->place <= arena_bytes[from] && record->length <= arena_bytes[from] - record->place)
            return arena[from] + record->place;
        error = 1 + from;
        return nullptr;
    }

    bool expects(const Collective& c, int from) const {
        return from != rank && c.in_bytes[from] != kNothing && (c.received[from] < c.in_bytes[from] || !c.heard[from]);
    }

    // Returns whether the record belongs to this collective; else the ranks do different things.
    bool fits(const Collective& c, int from, const Record* record) {
        if (record->number == c.number && record->kind == c.kind && record->total == c.in_bytes[from]) return true;
        error = 1 + from;
        return false;
    }

    bool receive(Collective& c) {
        bool any = false, waiting = false;
        if (c.sum) return receive_sum(c);
        for (int i = 1; i < world; ++i) {
            int from = (rank + i) % world;
            while (expects(c, from)) {
                Record* record = next(c, from);
                if (!record) {
                    waiting = true;
                    break;
                }
                if (!fits(c, from, record)) return any;
                const char* given = piece(from, record);
                if (!given || record->length > c.in_bytes[from] - c.received[from]) {
                    error = 1 + from;
                    return any;
                }
                if (record->length) std::memcpy(c.in[from] + c.received[from], given, record->length);
                c.received[from] += record->length;
                c.heard[from] = true;
                consume(c, from, record);
                any = true;
            }
        }
        c.all_received = !waiting;
        return any;
    }

    bool receive_sum(Collective& c) {
        bool any = false;
        const void* parts[kMaxRanks];
        Record* records[kMaxRanks];
        uint64_t total = c.in_bytes[rank];
        while (c.summed < total) {
            bool waiting = false;
            for (int from = 0; from < world; ++from) {
                if (from == rank) continue;
                Record* record = records[from] = next(c, from);
                if (!record) waiting = true;
                else if (!fits(c, from, record)) return any;
            }
            if (waiting) return any;
            // Pieces are longer from an arena: as much as there is of all is added up.
            uint64_t length = UINT64_MAX;
            for (int from = 0; from < world; ++from) {
                parts[from] = c.own + c.summed;
                if (from == rank) continue;
                const char* given = piece(from, records[from]);
                if (!given) return any;
                parts[from] = given + c.taken[from];
                length = std::min(length, records[from]->length - c.taken[from]);
            }
            uint64_t first = c.summed / c.from_width;
            c.sum(parts, world, c.result + first * c.to_width, length / c.from_width, c.add);
            c.summed += length;
            for (int from = 0; from < world; ++from)
                if (from != rank) {
                    c.received[from] += length;
                    c.taken[from] += length;
                    if (c.taken[from] == records[from]->length) {
                        c.taken[from] = 0;
                        consume(c, from, records[from]);
                    }
                }
            any = true;
        }
        c.all_received = true;
        return any;
    }

    // Does what can be done now; returns whether that was anything.
    bool progress() {
        bool any = false;
        for (bool again = true; again && !error;) {
            again = false;
            for (Collective& c : open)
                if (!c.all_sent) {
                    again |= send(c);
                    if (!c.all_sent) break;
                }
            for (Collective& c : open)
                if (!c.all_received) {
                    again |= receive(c);
                    if (!c.all_received) break;
                }
            for (Collective& c : open)
                if (c.all_sent && !c.all_read) {
                    c.all_read = true;
                    for (int r = 0; r < world; ++r) c.all_read &= has_read(c, r);
                    again |= c.all_read;
                }
            while (!open.empty() && open.front().done()) {
                open.pop_front();
                ++finished;
                again = true;
            }
            any |= again;
        }
        return any;
    }

    // Goes on with what the program started whenever another rank waits for this one.
    void help() {
        Desk* mine = desk(rank);
        std::unique_lock<std::mutex> lock(mutex);
        while (!stopping) {
            uint32_t calls = mine->help.load();
            mine->helper_asleep.store(1);
            if (!progress()) {
                lock.unlock();
                syscall(SYS_futex, &mine->help, FUTEX_WAIT, calls, nullptr, nullptr, 0);
                lock.lock();
            }
            mine->helper_asleep.store(0);
        }
    }

    // Opens the next collective, in which nothing goes anywhere yet.
    Collective& begin(uint32_t kind) {
        Collective& c = open.emplace_back();
        c.number = started++, c.kind = kind;
        c.out.assign(world, nullptr);
        c.in.assign(world, nullptr);
        c.out_bytes.assign(world, 0);
        c.in_bytes.assign(world, kNothing);
        c.sent.assign(world, 0);
        c.received.assign(world, 0);
        c.taken.assign(world, 0);
        c.end.assign(world, 0);
        c.announced.assign(world, false);
        c.heard.assign(world, false);
        return c;
    }

    int64_t after_start(const Collective& c) {
        int64_t number = int64_t(c.number);
        progress();
        if (!open.empty() && !helper.joinable()) helper = std::thread([this] { help(); });
        return number;
    }

    // Waits for the bell, unless something can be done. Returns with the lock held.
    void sleep(std::unique_lock<std::mutex>& lock, int64_t limit_us) {
        Desk* mine = desk(rank);
        uint32_t heard = mine->bell.load();
        // From here on others ring; what came before is seen here.
        mine->asleep.fetch_add(1);
        if (!progress() && !open.empty() && !error) {
            for (int r = 0; r < world; ++r)
                if (waits_for(r)) call_helper(r);
            lock.unlock();
            timespec limit{limit_us / 1000000, limit_us % 1000000 * 1000};
            syscall(SYS_futex, &mine->bell, FUTEX_WAIT, heard, &limit, nullptr, 0);
            lock.lock();
        }
        mine->asleep.fetch_sub(1);
    }

    // Whether the oldest open collective waits for a rank.
    bool waits_for(int r) {
        if (open.empty() || r == rank) return false;
        Collective& c = open.front();
        // Of a sum the next piece may be there already from some.
        bool owes = !c.all_received && (c.sum ? !next(c, r) : expects(c, r));
        Ring* mine = ring(rank, c.to_all ? rank : r);
        bool behind = !c.all_sent && sends(c, r) &&
                      mine->read_by(r)->value.load() == read_by_all(mine, c.to_all ? rank : r);
        return owes || behind || (c.all_sent && !c.all_read && !has_read(c, r));
    }
};

int64_t now_us() {
    timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000LL + t.tv_nsec / 1000;
}

inline void pause_a_moment() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

}  // namespace

extern "C" {

// Prepares a segment, which is all zeros, for the ranks. Called by one of them before the others attach.
int host_prepare(int fd, int world, uint64_t ring_bytes) {
    if (world < 1 || world > kMaxRanks || ring_bytes % kLine) return EINVAL;
    if (Sizes(world, ring_bytes).piece == 0) return EINVAL;
    if (ftruncate(fd, off_t(Sizes(world, ring_bytes).bytes()))) return errno;
    Segment segment{};
    segment.magic = kMagic, segment.world = uint32_t(world), segment.ring_bytes = ring_bytes;
    if (pwrite(fd, &segment, sizeof segment, 0) != ssize_t(sizeof segment)) return errno ? errno : EIO;
    return 0;
}

void* host_attach(int fd, int rank, int world, uint64_t ring_bytes, int spins) {
    Sizes sizes(world, ring_bytes);
    size_t bytes = sizes.bytes();
    struct stat found;
    if (fstat(fd, &found)) return nullptr;
    if (rank < 0 || rank >= world || world > kMaxRanks || uint64_t(found.st_size) < bytes) {
        errno = EINVAL;
        return nullptr;
    }
    void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (base == MAP_FAILED) return nullptr;
    const Segment* segment = static_cast<const Segment*>(base);
    if (segment->magic != kMagic || int(segment->world) != world || segment->ring_bytes != ring_bytes) {
        munmap(base, bytes);
        errno = EPROTO;
        return nullptr;
    }
    Group* group = new (std::nothrow) Group(static_cast<char*>(base), sizes, rank, spins);
    if (!group) {
        munmap(base, bytes);
        errno = ENOMEM;
    }
    return group;
}

// Lets the others' records speak of a rank's arena, and this one's of its own. `base`: where this process has it; null:
// it is mapped from `fd`. What has fewer bytes than `read_from` is copied all the same. Called before the first
// collective. Returns 0 or an error.
int host_arena(void* handle, int rank, int fd, void* base, uint64_t bytes, uint64_t read_from) {
    Group* group = static_cast<Group*>(handle);
    if (rank < 0 || rank >= group->world || group->arena[rank]) return EINVAL;
    if (!base) {
        struct stat found;
        if (fstat(fd, &found)) return errno;
        if (uint64_t(found.st_size) < bytes) return EINVAL;
        base = mmap(nullptr, bytes, PROT_READ, MAP_SHARED | MAP_NORESERVE, fd, 0);
        if (base == MAP_FAILED) return errno;
        group->mapped_here[rank] = true;
    }
    group->read_from = read_from ? read_from : 1;
    group->arena[rank] = static_cast<const char*>(base);
    group->arena_bytes[rank] = bytes;
    return 0;
}

// Forgets all arenas, where not every rank can read every other's.
void host_no_arenas(void* handle) {
    Group* group = static_cast<Group*>(handle);
    for (int r = 0; r < group->world; ++r) {
        if (group->mapped_here[r]) munmap(const_cast<char*>(group->arena[r]), group->arena_bytes[r]);
        group->arena[r] = nullptr, group->mapped_here[r] = false;
    }
}

void host_detach(void* handle) {
    Group* group = static_cast<Group*>(handle);
    {
        std::lock_guard<std::mutex> lock(group->mutex);
        group->stopping = true;
    }
    if (group->helper.joinable()) {
        group->call_helper(group->rank);
        group->helper.join();
    }
    host_no_arenas(handle);
    munmap(group->base, group->sizes.bytes());
    delete group;
}

// Starts to fill `full` (world, bytes) with what all ranks hold. Returns the collective's number, from 0, as all that
// start one do. Memory belongs to it until it is done.
int64_t host_all_gather(void* handle, uint32_t kind, const void* own, uint64_t bytes, void* full) {
    Group* group = static_cast<Group*>(handle);
    std::lock_guard<std::mutex> lock(group->mutex);
    Collective& c = group->begin(kind);
    c.to_all = true;
    for (int r = 0; r < group->world; ++r) {
        c.out[r] = own ? static_cast<const char*>(own) : group->base;  // nothing is a message, too
        c.out_bytes[r] = c.in_bytes[r] = bytes;
        c.in[r] = static_cast<char*>(full) + r * bytes;
    }
    char* place = c.in[group->rank];
    int64_t number = group->after_start(c);
    if (place != own && bytes) std::memmove(place, own, bytes);
    return number;
}

// Starts to overwrite `data` with what rank `source` holds.
int64_t host_broadcast(void* handle, uint32_t kind, void* data, uint64_t bytes, int source) {
    Group* group = static_cast<Group*>(handle);
    std::lock_guard<std::mutex> lock(group->mutex);
    Collective& c = group->begin(kind);
    c.to_all = true;
    if (group->rank == source) {
        c.out.assign(group->world, static_cast<const char*>(data));
        c.out_bytes.assign(group->world, bytes);
    } else {
        c.in[source] = static_cast<char*>(data);
        c.in_bytes[source] = bytes;
    }
    return group->after_start(c);
}

// Starts to send out[r] to, and to receive in[r] from, each rank r.
int64_t host_all_to_all(void* handle, uint32_t kind, const void* const* out, const uint64_t* out_bytes, void* const* in,
                        const uint64_t* in_bytes) {
    Group* group = static_cast<Group*>(handle);
    std::lock_guard<std::mutex> lock(group->mutex);
    Collective& c = group->begin(kind);
    int own = group->rank;
    uint64_t bytes = out_bytes[own] < in_bytes[own] ? out_bytes[own] : in_bytes[own];
    for (int r = 0; r < group->world; ++r) {
        // Some address, also of nothing: that nothing comes is a message.
        c.out[r] = out_bytes[r] ? static_cast<const char*>(out[r]) : group->base;
        c.in[r] = static_cast<char*>(in[r]);
        c.out_bytes[r] = out_bytes[r], c.in_bytes[r] = in_bytes[r];
    }
    int64_t number = group->after_start(c);
    if (bytes && in[own] != out[own]) std::memmove(in[own], out[own], bytes);
    return number;
}

// Starts a sum: `parts` is (world, count) of `from`, and `result` (count,) of `to` gets this rank's row of the sum over
// all ranks, in rank order; with `add` it is added to what `result` holds. Returns -1 where these types cannot be added.
int64_t host_sum(void* handle, uint32_t kind, const void* parts, uint64_t count, int from, void* result, int to,
                 int add) {
    Sum sum = sum_of(from, to);
    if (!sum) return -1;
    Group* group = static_cast<Group*>(handle);
    std::lock_guard<std::mutex> lock(group->mutex);
    Collective& c = group->begin(kind);
    c.sum = sum, c.from_width = width(from), c.to_width = width(to), c.add = add;
    uint64_t bytes = count * c.from_width;
    for (int r = 0; r < group->world && bytes; ++r) {
        c.out[r] = static_cast<const char*>(parts) + r * bytes;
        c.out_bytes[r] = c.in_bytes[r] = bytes;
    }
    c.in_bytes[group->rank] = bytes;
    c.own = c.out[group->rank];
    c.result = static_cast<char*>(result);
    return group->after_start(c);
}

// Returns 0 when collective `number` is done, 1 when it is not after `limit_us`, -(1 + r) when rank r does another one.
int host_wait(void* handle, int64_t number, int64_t limit_us) {
    Group* group = static_cast<Group*>(handle);
    std::unique_lock<std::mutex> lock(group->mutex);
    int64_t deadline = 0;
    int found = 1;
    for (int spin = 0;;) {
        if (group->progress()) spin = 0;
        if (int64_t(group->finished) > number) found = 0;
        else if (group->error) found = -int(group->error);
        if (found != 1) break;
        if (spin++ < group->spins) {
            lock.unlock();
            for (int i = 0; i < 16; ++i) pause_a_moment();
            lock.lock();
            continue;
        }
        int64_t now = now_us();
        if (!deadline) deadline = now + limit_us;
        if (now >= deadline) break;
        group->sleep(lock, deadline - now);
    }
    return found;
}

// Ends it: what is under way is dropped, and memory is not touched any more.
void host_abandon(void* handle) {
    Group* group = static_cast<Group*>(handle);
    std::lock_guard<std::mutex> lock(group->mutex);
    group->open.clear();
    group->error = 1 + uint64_t(group->rank);
}

// Sets found[r] for every rank that the oldest collective under way waits for.
void host_missing(void* handle, unsigned char* found) {
    Group* group = static_cast<Group*>(handle);
    std::lock_guard<std::mutex> lock(group->mutex);
    for (int r = 0; r < group->world; ++r) found[r] = group->waits_for(r);
}

}  // extern "C"
