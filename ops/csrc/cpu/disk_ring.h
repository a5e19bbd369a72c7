// A ring of io_uring by its system calls. Source: Axboe 2019, Efficient IO with io_uring; io_uring_setup(2).

#pragma once

#include <cerrno>
#include <cstdint>

#if defined(__linux__) && __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#include <sys/syscall.h>
#if defined(__NR_io_uring_setup) && defined(IORING_FEAT_RW_CUR_POS)
#define SHARDLIGHT_HAS_RING 1
#endif
#endif

#if defined(SHARDLIGHT_HAS_RING)

#include <sys/mman.h>
#include <unistd.h>

#include <cstring>
#include <vector>

namespace shardlight::disk {

class Ring {
  public:
    Ring() = default;
    Ring(const Ring&) = delete;
    ~Ring() {
        if (entries_) munmap(entries_, entries_bytes_);
        if (rings_) munmap(rings_, rings_bytes_);
        if (fd_ >= 0) close(fd_);
    }

    // Returns 0, or the errno with which the system refuses one that reads and writes.
    int open(unsigned entries) {
        io_uring_params given;
        std::memset(&given, 0, sizeof given);
        given.flags = IORING_SETUP_CLAMP;
        fd_ = int(syscall(__NR_io_uring_setup, entries, &given));
        if (fd_ < 0) return errno;
        if (!(given.features & IORING_FEAT_SINGLE_MMAP) || !(given.features & IORING_FEAT_NODROP)) return ENOSYS;
        if (given.sq_entries < entries) return ENOMEM;
        const size_t submissions = given.sq_off.array + given.sq_entries * sizeof(uint32_t);
        const size_t completions = given.cq_off.cqes + given.cq_entries * sizeof(io_uring_cqe);
        rings_bytes_ = submissions > completions ? submissions : completions;
        entries_bytes_ = given.sq_entries * sizeof(io_uring_sqe);
        rings_ = map(rings_bytes_, IORING_OFF_SQ_RING);
        entries_ = map(entries_bytes_, IORING_OFF_SQES);
        if (!rings_ || !entries_) return ENOMEM;
        char* base = static_cast<char*>(rings_);
        const auto number = [base](uint32_t offset) { return reinterpret_cast<uint32_t*>(base + offset); };
        sq_head_ = number(given.sq_off.head), sq_tail_ = number(given.sq_off.tail);
        sq_mask_ = *number(given.sq_off.ring_mask), sq_array_ = number(given.sq_off.array);
        cq_head_ = number(given.cq_off.head), cq_tail_ = number(given.cq_off.tail);
        cq_mask_ = *number(given.cq_off.ring_mask);
        cqes_ = reinterpret_cast<io_uring_cqe*>(base + given.cq_off.cqes);
        return tried();
    }

    void push(int what, int fd, const void* at, uint32_t bytes, uint64_t offset, uint64_t user) {
        const uint32_t place = tail_ & sq_mask_;
        io_uring_sqe& entry = static_cast<io_uring_sqe*>(entries_)[place];
        std::memset(&entry, 0, sizeof entry);
        entry.opcode = uint8_t(what), entry.fd = fd, entry.off = offset;
        entry.addr = reinterpret_cast<uintptr_t>(at), entry.len = bytes, entry.user_data = user;
        sq_array_[place] = place;
        __atomic_store_n(sq_tail_, ++tail_, __ATOMIC_RELEASE);
    }

    // Submits what was pushed and waits for `least` completions. Returns 0, or an errno.
    int enter(unsigned least) {
        const unsigned waiting = tail_ - __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
        return syscall(__NR_io_uring_enter, fd_, waiting, least, IORING_ENTER_GETEVENTS, nullptr, 0) < 0 ? errno : 0;
    }

    // Takes back what was pushed and is not submitted; returns whose it was.
    std::vector<uint64_t> withdraw() {
        std::vector<uint64_t> found;
        const uint32_t head = __atomic_load_n(sq_head_, __ATOMIC_ACQUIRE);
        for (; tail_ != head; --tail_)
            found.push_back(static_cast<io_uring_sqe*>(entries_)[(tail_ - 1) & sq_mask_].user_data);
        __atomic_store_n(sq_tail_, tail_, __ATOMIC_RELEASE);
        return found;
    }

    // Calls take(user, result) for each completion that is there.
    template <class Take> void reap(Take take) {
        uint32_t head = *cq_head_;
        while (head != __atomic_load_n(cq_tail_, __ATOMIC_ACQUIRE)) {
            const io_uring_cqe found = cqes_[head & cq_mask_];
            __atomic_store_n(cq_head_, ++head, __ATOMIC_RELEASE);
            take(found.user_data, int64_t(found.res));
        }
    }

  private:
    int fd_ = -1;
    void *rings_ = nullptr, *entries_ = nullptr;
    size_t rings_bytes_ = 0, entries_bytes_ = 0;
    uint32_t *sq_head_ = nullptr, *sq_tail_ = nullptr, *sq_array_ = nullptr, *cq_head_ = nullptr, *cq_tail_ = nullptr;
    uint32_t sq_mask_ = 0, cq_mask_ = 0, tail_ = 0;
    io_uring_cqe* cqes_ = nullptr;

    void* map(size_t bytes, uint64_t what) {
        void* made = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd_, off_t(what));
        if (made == MAP_FAILED) return nullptr;
        madvise(made, bytes, MADV_DONTFORK);
        return made;
    }

    // Setting up may be allowed where entering is not, and older systems know neither reads nor writes.
    int tried() {
        constexpr int kOps = 256;
        std::vector<uint64_t> memory((sizeof(io_uring_probe) + kOps * sizeof(io_uring_probe_op)) / sizeof(uint64_t) + 1);
        auto* probe = reinterpret_cast<io_uring_probe*>(memory.data());
        if (syscall(__NR_io_uring_register, fd_, IORING_REGISTER_PROBE, probe, kOps) < 0) return errno;
        for (int what : {IORING_OP_READ, IORING_OP_WRITE})
            if (what > probe->last_op || !(probe->ops[what].flags & IO_URING_OP_SUPPORTED)) return ENOSYS;
        push(IORING_OP_NOP, -1, nullptr, 0, 0, 1);
        const int error = enter(1);
        bool came = false;
        reap([&](uint64_t user, int64_t) { came = user == 1; });
        return error ? error : came ? 0 : EIO;
    }
};

}  // namespace shardlight::disk

#endif
