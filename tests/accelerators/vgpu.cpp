// "vgpu": a torch device of host memory that breaks where a GPU breaks.
//
// Theory of operation. Kernels are those of the CPU, and they run when they are launched. So a program that a
// GPU would run correctly gets the CPU's numbers, and a program that has one of these faults fails here in
// every run, not by luck:
//
// - A tensor's data_ptr is an address at which there is no memory: reading it on the host is a segmentation
//   fault. Only kernels know where the memory is. No address is used twice, and new memory is filled with 0xff.
// - A kernel's tensors must lie on one device; of the CPU's it takes numbers alone (tensors without
//   dimensions).
// - Random numbers come from the device's own generator and differ from the CPU's for the same seed.
// - A "lane" is one stream of one device. Each lane has a vector clock: of each lane the launches that are
//   known to come before. Events and synchronizations join clocks. An access to memory that conflicts with an
//   earlier access of which the clock knows nothing is a race, and raises. (Ranges of bytes are compared; the
//   range of a strided view is all from its first byte to its last.)
// - The host has a clock, too: the launches that it knows to be over. What a non_blocking copy to the host
//   brings is 0xff until the host knows that the copy is over; then the copy is "delivered". If the host
//   changed the source of a non_blocking copy from pinned memory before that, an error is noted.
// - Memory that is freed while a lane may use it is noted as an error, as nothing can be raised there.
// - A device has a limit of bytes, beyond which torch.OutOfMemoryError is raised, and torch's memory
//   statistics.
// - The host's waits and the launches of kernels are counted.
// - Somebody may be told before the first launch of each kernel, in which a driver loads it.
//
// What it does not show: time, overlap, the numerics of a GPU, the split of cached memory, CUDA graphs.
//
// Locks. `state_lock` guards all that is global, for moments in which nothing of torch is called that may take
// Python's lock: a thread that has Python's lock may wait for ours. `delivery_lock` is held while copies are
// delivered, and taken before `state_lock`. References to tensors are dropped after both.

#include <ATen/EmptyTensor.h>
#include <ATen/SDPBackend.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/jit_type.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/convolution.h>
#include <ATen/ops/convolution_backward.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <ATen/ops/empty_strided.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <signal.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

namespace {

using at::Tensor;
using c10::DeviceIndex;

constexpr auto kVgpu = c10::DeviceType::PrivateUse1;
constexpr int kDevices = 8;
constexpr int kStreams = 64;  // of a device; further ones share these, as those of CUDA do
constexpr int kLanes = kDevices * kStreams;
constexpr size_t kArenaBytes = size_t(1) << 39;   // addresses alone, without memory
constexpr size_t kAlignment = 64;                 // of the memory
constexpr size_t kRounding = 512;                 // the caching allocators of GPUs round sizes to this
constexpr int64_t kCapacity = int64_t(64) << 30;  // bytes of a device that has no limit
constexpr int kQuestions = 2;  // an event is over after so many questions, so that a host that polls goes on

const auto kKeys = c10::DispatchKeySet(c10::DispatchKey::PrivateUse1);
const std::string kCopy = "aten::copy_";
const std::string kResize = "resize_";

// -- clocks and accesses -------------------------------------------------------------------------------------

// Of each lane the number of its launches that are known to come before.
struct Clock {
    std::array<int64_t, kLanes> launches{};

    void join(const Clock& other) {
        for (int lane = 0; lane < kLanes; ++lane) {
            launches[lane] = std::max(launches[lane], other.launches[lane]);
        }
    }

    bool includes(int lane, int64_t launch) const {
        return launch <= launches[lane];
    }

    bool includes(const Clock& other) const {
        for (int lane = 0; lane < kLanes; ++lane) {
            if (other.launches[lane] > launches[lane]) {
                return false;
            }
        }
        return true;
    }
};

// A kernel's use of the bytes [begin, end) of a block.
struct Access {
    size_t begin;
    size_t end;
    int lane;
    int64_t launch;
    bool writes;
    const std::string* kernel;
};

// Memory of a device, or pinned memory of the host.
struct Block {
    size_t bytes;
    bool on_host;
    int lane;                      // for which it was allocated; 0 on the host
    char* memory;                  // where a device's bytes are in truth
    std::vector<Access> accesses;  // those that a later access may conflict with
    std::set<int> recorded;        // lanes of record_stream
};

// A non_blocking copy between the device and the host's memory [begin, end) that the host does not know to be
// over.
struct Pending {
    int lane;
    int64_t launch;
    const char* begin;
    const char* end;
    std::function<void()> deliver;
};

// What an event has recorded.
struct Mark {
    Clock clock;
    std::chrono::steady_clock::time_point time;
    int questions = 0;
};

struct Device {
    int streams = 0;  // that were made
    int64_t limit = kCapacity;
    int64_t synchronizations = 0;
    int64_t launches = 0;
    std::map<int64_t, int64_t> cached;  // how many freed blocks of each size are kept
    c10::CachingDeviceAllocator::DeviceStats memory;
};

struct State {
    std::array<Device, kDevices> devices;
    std::array<Clock, kLanes> clocks;
    Clock host;
    char* arena = nullptr;
    char* arena_next = nullptr;
    std::map<const char*, Block> blocks;  // by their first byte
    std::vector<Pending> pending;         // in the order of their launches
    std::vector<std::string> errors;
    at::HostStats pinned;
};

// It is never destroyed: tensors may be freed at the end of the process.
State& state = *new State;
std::mutex state_lock;
std::mutex delivery_lock;
using Locked = std::lock_guard<std::mutex>;

thread_local DeviceIndex current_device = 0;
thread_local std::array<int, kDevices> current_stream{};

int lane_of(DeviceIndex device, c10::StreamId stream) {
    return device * kStreams + static_cast<int>(stream);
}

int lane_of(const c10::Stream& stream) {
    return lane_of(stream.device_index(), stream.id());
}

int current_lane(DeviceIndex device) {
    return lane_of(device, current_stream[device]);
}

DeviceIndex device_of(int lane) {
    return static_cast<DeviceIndex>(lane / kStreams);
}

std::string name_of(int lane) {
    return "stream " + std::to_string(lane % kStreams) + " of vgpu:" + std::to_string(lane / kStreams);
}

DeviceIndex checked(DeviceIndex device) {
    TORCH_CHECK(device >= 0 && device < kDevices, "there is no vgpu:", int(device), ": there are ", kDevices);
    return device;
}

DeviceIndex index_of(c10::Device device) {
    return device.has_index() ? checked(device.index()) : current_device;
}

bool on_vgpu(const Tensor& tensor) {
    return tensor.defined() && tensor.device().type() == kVgpu;
}

// The block that holds this address, or none. Call it with the lock.
std::pair<const char* const, Block>* block_at(const void* address) {
    const auto* byte = static_cast<const char*>(address);
    auto after = state.blocks.upper_bound(byte);
    if (after == state.blocks.begin()) {
        return nullptr;
    }
    auto& found = *--after;
    return byte < found.first + found.second.bytes ? &found : nullptr;
}

// The bytes of a storage that a tensor reaches.
std::pair<const char*, const char*> range_of(const Tensor& tensor) {
    const auto* storage = static_cast<const char*>(tensor.storage().data());
    const auto* begin = storage + tensor.storage_offset() * tensor.itemsize();
    return {begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize())};
}

// Raises where an access conflicts with an earlier one that `clock` does not include; else notes it. With the
// lock.
void access(Block& block, const Access& made, const Clock& clock) {
    for (const auto& other : block.accesses) {
        const bool apart = other.end <= made.begin || made.end <= other.begin;
        const bool both_read = !made.writes && !other.writes;
        if (apart || both_read || clock.includes(other.lane, other.launch)) {
            continue;
        }
        TORCH_CHECK(false, "vgpu race: ", *made.kernel, " on ", name_of(made.lane),
                    made.writes ? " writes" : " reads", " what ", *other.kernel, " on ", name_of(other.lane),
                    other.writes ? " writes" : " reads", ", and no event orders them: let the stream wait");
    }
    // An earlier access is forgotten where whatever conflicts with it later conflicts with this one, too; or
    // where the host knows that it is over, as the host's later launches come after it.
    std::erase_if(block.accesses, [&](const Access& other) {
        const bool inside = made.begin <= other.begin && other.end <= made.end;
        const bool stronger = made.writes || !other.writes;
        const bool ordered = clock.includes(other.lane, other.launch);
        return (inside && stronger && ordered) || state.host.includes(other.lane, other.launch);
    });
    block.accesses.push_back(made);
}

// -- the host's waits ----------------------------------------------------------------------------------------

// Delivers the pending copies that `over` selects. The caller holds no lock.
void deliver(const std::function<bool(const Pending&)>& over) {
    std::vector<Pending> found;  // destroyed after the locks
    Locked delivering(delivery_lock);
    {
        Locked locked(state_lock);
        std::erase_if(state.pending, [&](Pending& each) {
            if (!over(each)) {
                return false;
            }
            found.push_back(std::move(each));
            return true;
        });
    }
    // Whoever delivers may be inside a mode of Python or of autograd; these are plain copies.
    at::AutoDispatchBelowADInplaceOrView no_autograd;
    c10::impl::ExcludeDispatchKeyGuard no_python(c10::python_ks);
    for (auto& each : found) {
        each.deliver();
    }
}

// The host knows now that these launches are over.
void reach(const Clock& clock) {
    {
        Locked locked(state_lock);
        state.host.join(clock);
    }
    deliver([](const Pending& each) { return state.host.includes(each.lane, each.launch); });
}

void count_synchronization(DeviceIndex device) {
    Locked locked(state_lock);
    ++state.devices[device].synchronizations;
}

void synchronize_lane(int lane) {
    Clock clock;
    {
        Locked locked(state_lock);
        ++state.devices[device_of(lane)].synchronizations;
        clock = state.clocks[lane];
    }
    reach(clock);
}

// -- memory --------------------------------------------------------------------------------------------------

int64_t rounded(size_t bytes) {
    return static_cast<int64_t>((bytes + kRounding - 1) / kRounding * kRounding);
}

char* host_memory(size_t bytes) {
    auto* memory = static_cast<char*>(std::aligned_alloc(kAlignment, rounded(bytes)));
    TORCH_CHECK(memory != nullptr, "vgpu: the host has no memory left");
    return memory;
}

constexpr size_t kAll = 0;  // c10::CachingAllocator::StatType::AGGREGATE

// Memory of the devices, with the statistics of a caching allocator that never splits a block.
struct DeviceMemory final : c10::DeviceAllocator {
    c10::DataPtr allocate(size_t bytes) override {
        const c10::Device device(kVgpu, current_device);
        if (bytes == 0) {
            return {nullptr, nullptr, &free, device};
        }
        auto* memory = host_memory(bytes);
        memset(memory, 0xff, bytes);
        Locked locked(state_lock);
        try {
            reserve(current_device, bytes);
        } catch (...) {
            std::free(memory);
            throw;
        }
        char* begin = addresses(bytes);
        const int lane = current_lane(current_device);
        state.blocks.emplace(begin, Block{.bytes = bytes, .on_host = false, .lane = lane, .memory = memory});
        return {begin, begin, &free, device};
    }

    static void free(void* address) {
        if (address == nullptr) {
            return;
        }
        Locked locked(state_lock);
        auto freed = state.blocks.extract(static_cast<const char*>(address));
        const Block& block = freed.mapped();
        note_early_free(block);
        auto& device = state.devices[device_of(block.lane)];
        const auto size = rounded(block.bytes);
        ++device.cached[size];
        device.memory.allocation[kAll].decrease(1);
        device.memory.active[kAll].decrease(1);
        device.memory.allocated_bytes[kAll].decrease(size);
        device.memory.active_bytes[kAll].decrease(size);
        device.memory.requested_bytes[kAll].decrease(block.bytes);
        std::free(block.memory);
    }

    bool initialized() override {
        return true;
    }

    void emptyCache(c10::MempoolId_t) override {
        Locked locked(state_lock);
        for (auto& device : state.devices) {
            release_cached(device);
        }
    }

    void recordStream(const c10::DataPtr& memory, c10::Stream stream) override {
        Locked locked(state_lock);
        if (auto* found = block_at(memory.get())) {
            found->second.recorded.insert(lane_of(stream));
        }
    }

    c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
        Locked locked(state_lock);
        return state.devices[checked(device)].memory;
    }

    void resetAccumulatedStats(DeviceIndex device) override {
        each_statistic(device, [](auto& statistic) { statistic.reset_accumulated(); });
    }

    void resetPeakStats(DeviceIndex device) override {
        each_statistic(device, [](auto& statistic) { statistic.reset_peak(); });
    }

    std::pair<size_t, size_t> getMemoryInfo(DeviceIndex index) override {
        Locked locked(state_lock);
        auto& device = state.devices[checked(index)];
        const auto reserved = device.memory.reserved_bytes[kAll].current;
        return {std::max<int64_t>(0, device.limit - reserved), device.limit};
    }

    c10::DeleterFnPtr raw_deleter() const override {
        return &free;
    }

    void copy_data(void*, const void*, size_t) const override {
        TORCH_CHECK(false, "vgpu: memory is copied by kernels alone");
    }

   private:
    // Takes a cached block of this size, or new memory of the device. With the lock.
    static void reserve(DeviceIndex index, size_t bytes) {
        auto& device = state.devices[index];
        auto& memory = device.memory;
        const auto size = rounded(bytes);
        if (auto kept = device.cached.find(size); kept != device.cached.end()) {
            if (--kept->second == 0) {
                device.cached.erase(kept);
            }
        } else {
            if (memory.reserved_bytes[kAll].current + size > device.limit) {
                ++memory.num_alloc_retries;
                release_cached(device);
            }
            const auto reserved = memory.reserved_bytes[kAll].current;
            if (reserved + size > device.limit) {
                ++memory.num_ooms;
                TORCH_CHECK_WITH(OutOfMemoryError, false, "vgpu out of memory: tried to allocate ", bytes,
                                 " bytes on vgpu:", int(index), "; ", reserved, " of ", device.limit,
                                 " are in use");
            }
            memory.reserved_bytes[kAll].increase(size);
            memory.segment[kAll].increase(1);
            ++memory.num_device_alloc;
        }
        memory.allocation[kAll].increase(1);
        memory.active[kAll].increase(1);
        memory.allocated_bytes[kAll].increase(size);
        memory.active_bytes[kAll].increase(size);
        memory.requested_bytes[kAll].increase(bytes);
    }

    static void release_cached(Device& device) {
        for (const auto& [size, count] : device.cached) {
            device.memory.reserved_bytes[kAll].decrease(size * count);
            device.memory.segment[kAll].decrease(count);
            device.memory.num_device_free += count;
        }
        device.cached.clear();
    }

    // New addresses, with some between them and the next. With the lock.
    static char* addresses(size_t bytes) {
        if (state.arena == nullptr) {
            const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
            void* mapped = mmap(nullptr, kArenaBytes, PROT_NONE, flags, -1, 0);
            TORCH_CHECK(mapped != MAP_FAILED, "vgpu: no range of addresses is left: ", strerror(errno));
            state.arena = state.arena_next = static_cast<char*>(mapped);
        }
        char* begin = state.arena_next;
        state.arena_next += rounded(bytes) + kRounding;
        TORCH_CHECK(state.arena_next <= state.arena + kArenaBytes, "vgpu: all addresses were used once");
        return begin;
    }

    // What is allocated next for the block's lane may lie in this memory, and comes after what that lane and
    // the host know to be over.
    static void note_early_free(const Block& block) {
        for (const auto& use : block.accesses) {
            const bool ordered = use.lane == block.lane || block.recorded.count(use.lane) != 0 ||
                                 state.host.includes(use.lane, use.launch) ||
                                 state.clocks[block.lane].includes(use.lane, use.launch);
            if (!ordered) {
                state.errors.push_back("memory of " + std::to_string(block.bytes) + " bytes, allocated for " +
                                       name_of(block.lane) + ", is freed while " + *use.kernel + " on " +
                                       name_of(use.lane) + " may use it: call record_stream, or keep the tensor");
                return;
            }
        }
    }

    template <class Reset>
    static void each_statistic(DeviceIndex device, Reset reset) {
        Locked locked(state_lock);
        auto& memory = state.devices[checked(device)].memory;
        for (auto* each : {&memory.allocation, &memory.segment, &memory.active, &memory.allocated_bytes,
                           &memory.reserved_bytes, &memory.active_bytes, &memory.requested_bytes}) {
            reset((*each)[kAll]);
        }
    }
};

DeviceMemory& device_memory = *new DeviceMemory;

// Pinned memory of the host.
struct PinnedMemory final : at::HostAllocator {
    c10::DataPtr allocate(size_t bytes) override {
        if (bytes == 0) {
            return {nullptr, nullptr, &free, c10::Device(c10::kCPU)};
        }
        auto* begin = host_memory(bytes);
        Locked locked(state_lock);
        state.blocks.emplace(begin, Block{.bytes = bytes, .on_host = true, .lane = 0, .memory = begin});
        state.pinned.allocations.increase(1);
        state.pinned.allocated_bytes.increase(bytes);
        return {begin, begin, &free, c10::Device(c10::kCPU)};
    }

    // A copy that is not over holds a reference to its tensor: nobody uses this memory any more.
    static void free(void* begin) {
        if (begin == nullptr) {
            return;
        }
        {
            Locked locked(state_lock);
            auto freed = state.blocks.extract(static_cast<const char*>(begin));
            state.pinned.allocations.decrease(1);
            state.pinned.allocated_bytes.decrease(freed.mapped().bytes);
        }
        std::free(begin);
    }

    bool record_event(void*, void*, c10::Stream) override {
        return true;
    }

    void empty_cache() override {}

    at::HostStats get_stats() override {
        Locked locked(state_lock);
        return state.pinned;
    }

    void reset_accumulated_stats() override {
        Locked locked(state_lock);
        state.pinned.allocations.reset_accumulated();
        state.pinned.allocated_bytes.reset_accumulated();
    }

    void reset_peak_stats() override {
        Locked locked(state_lock);
        state.pinned.allocations.reset_peak();
        state.pinned.allocated_bytes.reset_peak();
    }

    c10::DeleterFnPtr raw_deleter() const override {
        return &free;
    }

    void copy_data(void* to, const void* from, size_t bytes) const override {
        default_copy_data(to, from, bytes);
    }
};

PinnedMemory& pinned_memory = *new PinnedMemory;

bool is_pinned(const void* address) {
    Locked locked(state_lock);
    auto* found = block_at(address);
    return found != nullptr && found->second.on_host;
}

// As cudaHostRegister does: memory that others own is pinned from now on.
void register_host(const Tensor& memory) {
    const bool fits = memory.is_cpu() && memory.is_contiguous() && memory.nbytes() > 0;
    TORCH_CHECK(fits, "register contiguous host memory");
    const auto [begin, end] = range_of(memory);
    Locked locked(state_lock);
    TORCH_CHECK(block_at(begin) == nullptr, "this memory is pinned already");
    const auto bytes = static_cast<size_t>(end - begin);
    state.blocks.emplace(begin, Block{.bytes = bytes, .on_host = true, .lane = 0, .memory = nullptr});
}

void unregister_host(const Tensor& memory) {
    const auto [begin, end] = range_of(memory);
    deliver([begin, end](const Pending& each) { return each.begin < end && begin < each.end; });
    Locked locked(state_lock);
    auto found = state.blocks.find(begin);
    TORCH_CHECK(found != state.blocks.end() && found->second.on_host, "this memory is not pinned");
    state.blocks.erase(found);
}

// -- kernels -------------------------------------------------------------------------------------------------

// One kernel on the current stream of a device.
class Launch {
   public:
    explicit Launch(const std::string* kernel) : kernel_(kernel) {}

    Launch(const Launch&) = delete;
    Launch& operator=(const Launch&) = delete;

    // The kernel reads or writes this memory: raises where that is a race. Host memory counts where it is
    // pinned.
    void touch(const Tensor& tensor, bool writes, DeviceIndex device) {
        Locked locked(state_lock);
        start(device);
        if (tensor.numel() == 0) {
            return;
        }
        const auto [first, last] = range_of(tensor);
        auto* found = block_at(first);
        if (found == nullptr) {
            return;
        }
        const auto begin = static_cast<size_t>(first - found->first);
        const auto end = static_cast<size_t>(last - found->first);
        const Access made{begin, end, lane_, number_, writes, kernel_};
        access(found->second, made, state.clocks[lane_]);
    }

    void touch(const Tensor& tensor, bool writes) {
        touch(tensor, writes, tensor.get_device());
    }

    // The same memory as a tensor of the CPU.
    Tensor open(const Tensor& tensor) {
        auto& storage = opened(tensor);
        auto alias = at::detail::make_tensor<c10::TensorImpl>(
            c10::Storage(storage.host), c10::DispatchKeySet(c10::DispatchKey::CPU), tensor.dtype());
        alias.unsafeGetTensorImpl()->set_storage_offset(tensor.storage_offset());
        alias.unsafeGetTensorImpl()->set_sizes_and_strides(tensor.sizes(), tensor.strides());
        return alias;
    }

    // The tensor of the device that is this view of what was opened; none where it is memory of its own.
    std::optional<Tensor> device_view(const Tensor& view) const {
        for (const auto& each : opened_) {
            if (view.storage().unsafeGetStorageImpl() != each.host.unsafeGetStorageImpl()) {
                continue;
            }
            auto result =
                at::detail::make_tensor<c10::TensorImpl>(c10::Storage(each.device), kKeys, view.dtype());
            result.unsafeGetTensorImpl()->set_storage_offset(view.storage_offset());
            result.unsafeGetTensorImpl()->set_sizes_and_strides(view.sizes(), view.strides());
            return result;
        }
        return std::nullopt;
    }

    int lane() const {
        return lane_;
    }

    int64_t number() const {
        return number_;
    }

   private:
    struct Opened {
        c10::Storage device;
        c10::Storage host;
    };

    // Puts the kernel behind what was launched before it on its stream, and behind what the host knows to be
    // over.
    void start(DeviceIndex device) {
        if (lane_ >= 0) {
            return;
        }
        lane_ = current_lane(device);
        ++state.devices[device].launches;
        auto& clock = state.clocks[lane_];
        clock.join(state.host);
        number_ = ++clock.launches[lane_];
    }

    static char* memory_of(const c10::Storage& storage) {
        const auto* data = static_cast<const char*>(storage.data());
        if (data == nullptr) {
            return nullptr;
        }
        Locked locked(state_lock);
        auto* found = block_at(data);
        TORCH_CHECK(found != nullptr, "vgpu: this memory was freed");
        return found->second.memory + (data - found->first);
    }

    Opened& opened(const Tensor& tensor) {
        const auto& storage = tensor.storage();
        for (auto& each : opened_) {
            if (each.device.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
                return each;
            }
        }
        auto* memory = memory_of(storage);
        auto nothing = [](void*) {};
        c10::DataPtr pointer(memory, memory, nothing, c10::Device(c10::kCPU));
        c10::Storage host(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(pointer), nullptr, false);
        return opened_.emplace_back(Opened{storage, std::move(host)});
    }

    const std::string* kernel_;
    int lane_ = -1;
    int64_t number_ = 0;
    std::vector<Opened> opened_;
};

// -- copies --------------------------------------------------------------------------------------------------

// The memory of a host tensor as whole numbers, in which all bits count: NaN is equal to itself there.
Tensor bits_of(const Tensor& tensor) {
    const auto item = tensor.itemsize();
    const auto type = item == 1 ? at::kChar : item == 2 ? at::kShort : item == 4 ? at::kInt : at::kLong;
    auto bits = at::detail::make_tensor<c10::TensorImpl>(
        c10::Storage(tensor.storage()), c10::DispatchKeySet(c10::DispatchKey::CPU),
        at::scalarTypeToTypeMeta(type));
    auto sizes = tensor.sizes().vec();
    auto strides = tensor.strides().vec();
    auto offset = tensor.storage_offset();
    if (item == 16) {  // complex128: two numbers
        for (auto& stride : strides) {
            stride *= 2;
        }
        sizes.push_back(2);
        strides.push_back(1);
        offset *= 2;
    }
    bits.unsafeGetTensorImpl()->set_storage_offset(offset);
    bits.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
    return bits;
}

void note(const std::string& error) {
    Locked locked(state_lock);
    state.errors.push_back(error);
}

// A pending copy comes before another copy of the same host memory: the race check has made sure of it.
void deliver_before(const Tensor& host) {
    const auto [first, last] = range_of(host);
    deliver([first, last](const Pending& each) { return each.begin < last && first < each.end; });
}

void add_pending(const Launch& launch, const Tensor& host, std::function<void()> deliver) {
    const auto [first, last] = range_of(host);
    Locked locked(state_lock);
    state.pending.push_back(Pending{launch.lane(), launch.number(), first, last, std::move(deliver)});
}

// The end of a copy between host and device: the host waits for it unless it is non_blocking and of pinned
// memory.
void end_copy(const Launch& launch, bool non_blocking, bool pinned) {
    if (!non_blocking) {
        synchronize_lane(launch.lane());
    } else if (!pinned) {
        count_synchronization(device_of(launch.lane()));  // a GPU's driver waits there; nobody may rely on it
    }
}

void copy_to_host(const Tensor& from, const Tensor& to, bool non_blocking) {
    Launch launch(&kCopy);
    const bool pinned = is_pinned(range_of(to).first);
    launch.touch(from, false);
    if (pinned) {
        launch.touch(to, true, from.get_device());
    }
    deliver_before(to);
    const auto values = launch.open(from);
    if (!non_blocking) {
        to.copy_(values);
    } else {
        auto arrived = at::empty(to.sizes(), to.options().pinned_memory(false));
        arrived.copy_(values);
        auto target = bits_of(to);
        target.fill_(-1);
        add_pending(launch, to, [target, arrived = bits_of(arrived)] {
            if (!target.eq(-1).all().item<bool>()) {
                note("the host wrote to the target of a non_blocking copy from the device before it was over");
            }
            target.copy_(arrived);
        });
    }
    end_copy(launch, non_blocking, pinned);
}

void copy_to_device(const Tensor& from, const Tensor& to, bool non_blocking) {
    Launch launch(&kCopy);
    const bool pinned = is_pinned(range_of(from).first) && from.is_contiguous();
    launch.touch(to, true);
    if (pinned) {
        launch.touch(from, false, to.get_device());
    }
    deliver_before(from);
    launch.open(to).copy_(from);
    if (non_blocking && pinned) {
        auto source = bits_of(from);
        add_pending(launch, from, [source, copied = source.clone()] {
            if (!source.equal(copied)) {
                note("the host changed the source of a non_blocking copy to the device before it was over");
            }
        });
    }
    end_copy(launch, non_blocking, pinned);
}

// It runs on the source's stream; the target's stream waits before and after it, as torch does for CUDA.
void copy_between_devices(const Tensor& from, const Tensor& to) {
    const int source = current_lane(from.get_device());
    const int target = current_lane(to.get_device());
    {
        Locked locked(state_lock);
        state.clocks[source].join(state.clocks[target]);
    }
    Launch launch(&kCopy);
    launch.touch(from, false);
    launch.touch(to, true, from.get_device());
    launch.open(to).copy_(launch.open(from));
    Locked locked(state_lock);
    state.clocks[target].join(state.clocks[source]);
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool non_blocking) {
    if (from.numel() == 0) {
        return to;
    }
    if (!on_vgpu(from)) {
        c10::DeviceGuard on(to.device());
        copy_to_device(from, to, non_blocking);
    } else if (!on_vgpu(to)) {
        c10::DeviceGuard on(from.device());
        copy_to_host(from, to, non_blocking);
    } else if (from.device() != to.device()) {
        copy_between_devices(from, to);
    } else {
        c10::DeviceGuard on(to.device());
        Launch launch(&kCopy);
        launch.touch(from, false);
        launch.touch(to, true);
        launch.open(to).copy_(launch.open(from));
    }
    return to;
}

// -- random numbers ------------------------------------------------------------------------------------------

// The generator of a device. A CPU generator inside draws, from another seed than a CPU generator would have.
struct DeviceGenerator final : c10::GeneratorImpl {
    at::Generator inner = at::detail::createCPUGenerator();

    explicit DeviceGenerator(DeviceIndex device)
        : GeneratorImpl(c10::Device(kVgpu, device), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)) {
        set_current_seed(c10::detail::getNonDeterministicRandom());
    }

    void set_current_seed(uint64_t seed) override {
        seed_ = seed;
        inner.set_current_seed(seed * 0x9E3779B97F4A7C15u + 1);
    }

    uint64_t current_seed() const override {
        return seed_;
    }

    uint64_t seed() override {
        set_current_seed(c10::detail::getNonDeterministicRandom());
        return seed_;
    }

    void set_offset(uint64_t) override {
        TORCH_CHECK(false, "a generator of vgpu has no offset");
    }

    uint64_t get_offset() const override {
        TORCH_CHECK(false, "a generator of vgpu has no offset");
    }

    void set_state(const c10::TensorImpl& to) override {
        inner.unsafeGetGeneratorImpl()->set_state(to);
    }

    c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
        return inner.unsafeGetGeneratorImpl()->get_state();
    }

   private:
    DeviceGenerator* clone_impl() const override {
        auto* made = new DeviceGenerator(device().index());
        made->seed_ = seed_;
        made->inner = inner.clone();
        return made;
    }

    uint64_t seed_ = 0;
};

const at::Generator& default_generator(DeviceIndex device) {
    static auto& all = *new std::array<at::Generator, kDevices>;
    static std::mutex lock;
    Locked locked(lock);
    auto& generator = all[device < 0 ? current_device : checked(device)];
    if (!generator.defined()) {
        generator = at::make_generator<DeviceGenerator>(device < 0 ? current_device : device);
        generator.set_current_seed(c10::default_rng_seed_val);
    }
    return generator;
}

// -- every other operator ------------------------------------------------------------------------------------

// What the kernel of an operator does, as far as a device cares.
enum class Kind {
    kernel,    // it reads and writes memory
    value,     // it does, and the host waits for what comes out: a number, or a size that depends on values
    view,      // it gives another view of memory, which it does not read
    metadata,  // it tells the host something about tensors, not about their values
};

struct Operator {
    Kind kind = Kind::kernel;
    bool indexes = false;            // an index may lie on the CPU, or be a mask
    bool waits_for_indices = false;  // the kernel itself turns such an index into one of the device
    bool takes_numbers = false;      // its lists may hold numbers of the CPU
    bool draws_unkeyed = false;      // it draws random numbers and takes no generator
    std::vector<bool> writes;        // of each argument
    std::vector<bool> is_generator;

    explicit Operator(const c10::OperatorHandle& handle) {
        const auto& schema = handle.schema();
        const auto& name = schema.name();
        const auto generator = c10::OptionalType::create(c10::GeneratorType::get());
        bool takes_generator = false;
        bool writes_any = false;
        for (const auto& argument : schema.arguments()) {
            writes.push_back(argument.alias_info() != nullptr && argument.alias_info()->isWrite());
            is_generator.push_back(argument.type()->isSubtypeOf(*generator));
            writes_any = writes_any || writes.back();
            takes_generator = takes_generator || is_generator.back();
        }
        bool returns_tensors = false;
        bool returns_views = !schema.returns().empty();
        for (const auto& result : schema.returns()) {
            const bool tensor = result.type()->isSubtypeOf(*c10::TensorType::get()) ||
                                result.type()->isSubtypeOf(*c10::ListType::ofTensors());
            returns_tensors = returns_tensors || tensor;
            returns_views = returns_views && result.alias_info() != nullptr && !result.alias_info()->isWrite();
        }
        // aten::index turns them before it comes here, by operators of their own.
        waits_for_indices = name == "aten::_index_put_impl_";
        indexes = waits_for_indices || name == "aten::index";
        takes_numbers = name.rfind("aten::_foreach_", 0) == 0;
        draws_unkeyed = handle.hasTag(at::Tag::nondeterministic_seeded) && !takes_generator;
        const bool depends = handle.hasTag(at::Tag::data_dependent_output) ||
                             (handle.hasTag(at::Tag::dynamic_output_shape) && !indexes);
        if (depends) {
            kind = Kind::value;
        } else if (returns_views) {
            kind = Kind::view;
        } else if (!returns_tensors && !writes_any && !schema.returns().empty()) {
            kind = Kind::metadata;
        }
    }
};

const Operator& operator_of(const c10::OperatorHandle& handle) {
    static thread_local std::unordered_map<const c10::FunctionSchema*, Operator> known;
    return known.try_emplace(&handle.schema(), handle).first->second;
}

// Runs one operator by the CPU's kernel: its tensors become views on the CPU, what comes out goes to the
// device.
class Call {
   public:
    Call(const c10::OperatorHandle& handle, torch::jit::Stack* stack)
        : handle_(handle),
          schema_(handle.schema()),
          operator_(operator_of(handle)),
          stack_(*stack),
          first_(stack->size() - schema_.arguments().size()),
          given_(stack->begin() + first_, stack->end()),
          device_(device()),
          launch_(&schema_.name()) {}

    void run() {
        c10::DeviceGuard on(device_);
        check_random();
        for (size_t at = 0; at < given_.size(); ++at) {
            auto& value = stack_[first_ + at];
            value = to_host(given_[at], at);
        }
        handle_.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), &stack_);
        for (auto& [to, from] : grown_) {
            grow(to, from);
        }
        const size_t results = schema_.returns().size();
        for (size_t at = 0; at < results; ++at) {
            auto& value = stack_[stack_.size() - results + at];
            value = to_device(value, schema_.returns()[at].alias_info());
        }
        if (waits()) {
            synchronize_lane(current_lane(device_.index()));
        }
    }

   private:
    bool computes() const {
        return operator_.kind == Kind::kernel || operator_.kind == Kind::value;
    }

    bool waits() const {
        return operator_.kind == Kind::value || waits_for_index_;
    }

    // Of the first argument that is on a device.
    c10::Device device() const {
        c10::Device found(kVgpu, current_device);
        bool any = false;
        auto look = [&](const Tensor& tensor) {
            if (!any && on_vgpu(tensor)) {
                found = tensor.device();
                any = true;
            }
        };
        for (const auto& value : given_) {
            if (value.isTensor()) {
                look(value.toTensor());
            } else if (value.isTensorList()) {
                for (const auto& tensor : value.toTensorVector()) {
                    look(tensor);
                }
            }
        }
        return found;
    }

    // No operator may draw from the CPU's generator. Attention may be asked for dropout, and is then refused.
    void check_random() const {
        if (!operator_.draws_unkeyed || operator_.kind == Kind::metadata) {
            return;
        }
        for (size_t at = 0; at < given_.size(); ++at) {
            if (schema_.arguments()[at].name() == "dropout_p") {
                TORCH_CHECK(given_[at].toDouble() == 0.0, schema_.name(), ": vgpu draws no numbers here");
                return;
            }
        }
        TORCH_CHECK(false, schema_.name(), " takes no generator: vgpu has no kernel for it");
    }

    c10::IValue to_host(const c10::IValue& value, size_t at) {
        const bool writes = operator_.writes[at];
        if (value.isTensor()) {
            return to_host(value.toTensor(), writes, /*number_allowed=*/!writes);
        }
        if (value.isTensorList()) {
            auto list = value.toTensorVector();
            for (auto& tensor : list) {
                tensor = to_host(tensor, writes, operator_.takes_numbers && !writes);
            }
            return list;
        }
        if (value.isOptionalTensorList()) {
            c10::List<std::optional<Tensor>> list;
            for (std::optional<Tensor> tensor : value.toOptionalTensorList()) {
                list.push_back(tensor ? std::optional(index_to_host(*tensor)) : tensor);
            }
            return list;
        }
        if (value.isDevice() && value.toDevice().type() == kVgpu) {
            return c10::Device(c10::kCPU);
        }
        if (operator_.is_generator[at]) {
            const auto generator = value.isGenerator() ? value.toGenerator() : default_generator(device_.index());
            TORCH_CHECK(generator.device() == device_, schema_.name(), ": expected a generator of ", device_,
                        ", got one of ", generator.device());
            return static_cast<DeviceGenerator*>(generator.unsafeGetGeneratorImpl())->inner;
        }
        return value;
    }

    Tensor to_host(const Tensor& tensor, bool writes, bool number_allowed) {
        if (!tensor.defined()) {
            return tensor;
        }
        if (tensor.device() != device_) {
            const bool number = tensor.is_cpu() && tensor.dim() == 0;
            TORCH_CHECK(number && number_allowed, schema_.name(), ": expected all tensors to be on ", device_,
                        ", but found one of shape ", tensor.sizes(), " on ", tensor.device());
            return tensor;
        }
        if (writes && tensor.storage().nbytes() == 0) {  // an `out` that the kernel gives its size
            auto host = at::empty(tensor.sizes(), tensor.options().device(at::kCPU));
            grown_.emplace_back(tensor, host);
            return host;
        }
        if (computes()) {
            launch_.touch(tensor, writes);
        }
        return launch_.open(tensor);
    }

    // A GPU takes indices of the CPU and copies them, and it counts a mask's elements: the host waits for both.
    Tensor index_to_host(const Tensor& index) {
        if (index.defined() && operator_.indexes) {
            const bool mask = index.scalar_type() == at::kBool || index.scalar_type() == at::kByte;
            waits_for_index_ = waits_for_index_ || (operator_.waits_for_indices && (mask || index.is_cpu()));
            if (index.is_cpu()) {
                return index;
            }
        }
        return to_host(index, false, true);
    }

    c10::IValue to_device(const c10::IValue& value, const c10::AliasInfo* alias) {
        if (value.isTensor()) {
            return to_device(value.toTensor(), alias);
        }
        if (value.isTensorList()) {
            auto list = value.toTensorVector();
            for (auto& tensor : list) {
                tensor = to_device(tensor, nullptr);
            }
            return list;
        }
        return value;
    }

    Tensor to_device(const Tensor& host, const c10::AliasInfo* alias) {
        if (!host.defined()) {
            return host;
        }
        for (size_t at = 0; alias != nullptr && alias->isWrite() && at < given_.size(); ++at) {
            const auto* his = schema_.arguments()[at].alias_info();
            if (his != nullptr && *his == *alias && given_[at].isTensor()) {
                return given_[at].toTensor();  // written in place
            }
        }
        if (auto view = launch_.device_view(host)) {
            return *view;
        }
        auto made = at::empty_strided(host.sizes(), host.strides(), host.options().device(device_));
        fill(made, host);
        return made;
    }

    void grow(const Tensor& to, const Tensor& from) {
        const auto& hooks = at::detail::getPrivateUse1Hooks();
        hooks.resizePrivateUse1Bytes(to.storage(), from.nbytes());
        to.unsafeGetTensorImpl()->set_sizes_contiguous(from.sizes());
        fill(to, from);
    }

    // What the kernel has written, into memory of the device.
    void fill(const Tensor& made, const Tensor& host) {
        if (host.numel() == 0) {
            return;
        }
        launch_.touch(made, true);
        launch_.open(made).copy_(host);
    }

    const c10::OperatorHandle& handle_;
    const c10::FunctionSchema& schema_;
    const Operator& operator_;
    torch::jit::Stack& stack_;
    const size_t first_;
    const std::vector<c10::IValue> given_;
    const c10::Device device_;
    Launch launch_;
    bool waits_for_index_ = false;
    std::vector<std::pair<Tensor, Tensor>> grown_;
};

// Called before the first launch of each kernel of the process.
std::atomic<void (*)(const char*)> on_load = nullptr;

void load(const c10::OperatorHandle& handle) {
    auto* const told = on_load.load();
    if (told == nullptr) {
        return;
    }
    static std::mutex lock;
    static std::set<std::string> loaded;
    const auto name = c10::toString(handle.operator_name());
    {
        std::lock_guard locked(lock);
        if (!loaded.insert(name).second) {
            return;
        }
    }
    told(name.c_str());
}

void fallback(const c10::OperatorHandle& handle, torch::jit::Stack* stack) {
    load(handle);
    Call(handle, stack).run();
}

// -- operators of its own ------------------------------------------------------------------------------------

template <class T>
using Maybe = std::optional<T>;

c10::ScalarType type_of(Maybe<c10::ScalarType> dtype) {
    return dtype.value_or(at::typeMetaToScalarType(at::get_default_dtype()));
}

Tensor empty_strided(at::IntArrayRef sizes, at::IntArrayRef strides, Maybe<c10::ScalarType> dtype,
                     Maybe<c10::Layout>, Maybe<c10::Device> device, Maybe<bool>) {
    c10::OptionalDeviceGuard on(device);
    return at::detail::empty_strided_generic(sizes, strides, &device_memory, kKeys, type_of(dtype));
}

Tensor empty(at::IntArrayRef sizes, Maybe<c10::ScalarType> dtype, Maybe<c10::Layout>, Maybe<c10::Device> device,
             Maybe<bool>, Maybe<c10::MemoryFormat> format) {
    c10::OptionalDeviceGuard on(device);
    return at::detail::empty_generic(sizes, &device_memory, kKeys, type_of(dtype), format);
}

// Another number of bytes; what fits of the content stays.
void resize_bytes(const c10::Storage& storage, size_t bytes) {
    const c10::Device device = storage.device();
    c10::DeviceGuard on(device);
    auto* impl = storage.unsafeGetStorageImpl();
    const auto kept = std::min(bytes, storage.nbytes());
    auto memory = device_memory.allocate(bytes);
    if (kept > 0) {
        auto as_bytes = [&](c10::Storage of) {
            const auto type = caffe2::TypeMeta::Make<uint8_t>();
            auto tensor = at::detail::make_tensor<c10::TensorImpl>(std::move(of), kKeys, type);
            tensor.unsafeGetTensorImpl()->set_sizes_contiguous({static_cast<int64_t>(kept)});
            return tensor;
        };
        c10::Storage larger(c10::Storage::use_byte_size_t(), bytes, std::move(memory), &device_memory, true);
        Launch launch(&kResize);
        const auto from = as_bytes(storage);
        const auto to = as_bytes(larger);
        launch.touch(from, false);
        launch.touch(to, true);
        launch.open(to).copy_(launch.open(from));
        memory = larger.unsafeGetStorageImpl()->set_data_ptr(c10::DataPtr(nullptr, device));
    }
    impl->set_data_ptr_noswap(std::move(memory));
    impl->set_nbytes(bytes);
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef sizes, Maybe<c10::MemoryFormat> format) {
    auto* impl = self.unsafeGetTensorImpl();
    const auto bytes = at::detail::computeStorageNbytesContiguous(sizes, self.itemsize(), self.storage_offset());
    if (bytes > self.storage().nbytes()) {
        resize_bytes(self.storage(), bytes);
    }
    impl->set_sizes_contiguous(sizes);
    if (format.has_value()) {
        impl->empty_tensor_restride(*format);
    }
    return self;
}

Tensor& set_to_nothing(Tensor& self) {
    c10::DeviceGuard on(self.device());
    c10::Storage nothing(c10::Storage::use_byte_size_t(), 0, device_memory.allocate(0), &device_memory, true);
    return self.set_(nothing, 0, {0}, {});
}

// The CPU's kernel draws from the CPU's default generator.
std::tuple<Tensor, Tensor> native_dropout(const Tensor& input, double p, Maybe<bool> train) {
    auto options = input.options().dtype(at::kBool);
    if (!train.value_or(true) || p == 0.0) {
        return {input.clone(), at::ones_like(input, options)};
    }
    auto mask = at::empty_like(input, options).bernoulli_(1 - p);
    return {input.mul(mask).mul_(p < 1.0 ? 1 / (1 - p) : 0.0), mask};
}

const std::string kConvolution = "aten::convolution";

// What a kernel of the CPU has made becomes memory of the device.
Tensor made(Launch& launch, const Tensor& result, const Tensor& like) {
    if (!result.defined()) {
        return result;
    }
    auto out = at::empty(result.sizes(), like.options());
    launch.touch(out, true);
    launch.open(out).copy_(result);
    return out;
}

// Convolutions have no fallback: torch asks a device for its own.
Tensor convolution(const Tensor& input, const Tensor& weight, const Maybe<Tensor>& bias, at::IntArrayRef stride,
                   at::IntArrayRef padding, at::IntArrayRef dilation, bool transposed,
                   at::IntArrayRef output_padding, int64_t groups) {
    c10::DeviceGuard on(input.device());
    Launch launch(&kConvolution);
    Maybe<Tensor> added;
    for (const auto& each : {input, weight}) {
        launch.touch(each, false);
    }
    if (bias.has_value() && bias->defined()) {
        launch.touch(*bias, false);
        added = launch.open(*bias);
    }
    return made(launch, at::convolution(launch.open(input), launch.open(weight), added, stride, padding, dilation,
                                        transposed, output_padding, groups), input);
}

std::tuple<Tensor, Tensor, Tensor> convolution_backward(
    const Tensor& grad, const Tensor& input, const Tensor& weight, at::IntArrayRef stride, at::IntArrayRef padding,
    at::IntArrayRef dilation, bool transposed, at::IntArrayRef output_padding, int64_t groups,
    std::array<bool, 3> wanted) {
    c10::DeviceGuard on(input.device());
    Launch launch(&kConvolution);
    for (const auto& each : {grad, input, weight}) {
        launch.touch(each, false);
    }
    const std::array<int64_t, 1> outputs = {grad.size(1)};
    const auto [to_input, to_weight, to_bias] =
        at::convolution_backward(launch.open(grad), launch.open(input), launch.open(weight), outputs, stride,
                                 padding, dilation, transposed, output_padding, groups, wanted);
    return {made(launch, to_input, input), made(launch, to_weight, weight), made(launch, to_bias, weight)};
}

// Whether attention is one kernel, as on a GPU. Elsewhere it is made of its parts.
int64_t choose_attention(const Tensor& query, const Tensor& key, const Tensor& value, const Maybe<Tensor>& mask,
                         double dropout, bool, Maybe<double>, bool) {
    const bool alike = query.dim() == 4 && key.dim() == 4 && query.size(1) == key.size(1) &&
                       query.size(3) == value.size(3) && query.numel() > 0 && key.numel() > 0;
    const bool dense = query.stride(-1) == 1 && key.stride(-1) == 1 && value.stride(-1) == 1;
    const bool plain = !mask.has_value() && dropout == 0.0;
    return static_cast<int64_t>(alike && dense && plain ? at::SDPBackend::flash_attention : at::SDPBackend::math);
}

void record_stream(Tensor& self, c10::Stream stream) {
    device_memory.recordStream(self.storage().data_ptr(), stream);
}

// A kernel that others emulate (a communicator's) uses this memory from here on, on the current stream.
void claim(const Tensor& tensor, bool writes) {
    static const std::string kernel = "communication";
    TORCH_CHECK(on_vgpu(tensor), "claim: a tensor on ", tensor.device());
    Launch(&kernel).touch(tensor, writes);
}

// What such a kernel reads: the host learns nothing by it, and no clock moves.
Tensor peek(const Tensor& tensor) {
    TORCH_CHECK(on_vgpu(tensor), "peek: a tensor on ", tensor.device());
    return Launch(nullptr).open(tensor).clone();
}

// What such a kernel writes.
void poke(Tensor& tensor, const Tensor& values) {
    TORCH_CHECK(on_vgpu(tensor), "poke: a tensor on ", tensor.device());
    Launch(nullptr).open(tensor).copy_(values);
}

// -- what torch asks of a device -----------------------------------------------------------------------------

c10::Stream stream_of(DeviceIndex device, int stream) {
    return c10::Stream(c10::Stream::UNSAFE, c10::Device(kVgpu, device), stream);
}

struct Guard final : c10::impl::DeviceGuardImplInterface {
    using Stream = c10::Stream;

    c10::DeviceType type() const override {
        return kVgpu;
    }

    c10::Device getDevice() const override {
        return {kVgpu, current_device};
    }

    void setDevice(c10::Device device) const override {
        current_device = index_of(device);
    }

    void uncheckedSetDevice(c10::Device device) const noexcept override {
        if (device.has_index()) {
            current_device = device.index();
        }
    }

    c10::Device exchangeDevice(c10::Device device) const override {
        auto before = getDevice();
        setDevice(device);
        return before;
    }

    DeviceIndex deviceCount() const noexcept override {
        return kDevices;
    }

    c10::DeviceCapability getDeviceCapability(c10::Device) const override {
        return {};
    }

    Stream getStream(c10::Device device) const override {
        return stream_of(index_of(device), current_stream[index_of(device)]);
    }

    Stream getDefaultStream(c10::Device device) const override {
        return stream_of(index_of(device), 0);
    }

    Stream getNewStream(c10::Device device, int) const override {
        Locked locked(state_lock);
        const auto index = index_of(device);
        return stream_of(index, 1 + state.devices[index].streams++ % (kStreams - 1));
    }

    Stream getStreamFromGlobalPool(c10::Device device, bool) const override {
        return getNewStream(device, 0);
    }

    Stream exchangeStream(Stream stream) const override {
        auto before = getStream(stream.device());
        current_stream[stream.device_index()] = static_cast<int>(stream.id());
        return before;
    }

    // It never blocks: work is over when somebody has asked a few times, or waited.
    bool queryStream(const Stream& stream) const override {
        static thread_local std::array<std::pair<int64_t, int>, kLanes> asked{};
        const int lane = lane_of(stream);
        Clock clock;
        {
            Locked locked(state_lock);
            clock = state.clocks[lane];
            if (state.host.includes(clock)) {
                return true;
            }
        }
        auto& [launch, questions] = asked[lane];
        questions = launch == clock.launches[lane] ? questions + 1 : 1;
        launch = clock.launches[lane];
        if (questions <= kQuestions) {
            return false;
        }
        reach(clock);
        return true;
    }

    void synchronizeStream(const Stream& stream) const override {
        synchronize_lane(lane_of(stream));
    }

    void synchronizeDevice(DeviceIndex device) const override {
        Clock all;
        {
            Locked locked(state_lock);
            ++state.devices[checked(device)].synchronizations;
            for (int stream = 0; stream < kStreams; ++stream) {
                all.join(state.clocks[lane_of(device, stream)]);
            }
        }
        reach(all);
    }

    void record(void** event, const Stream& stream, DeviceIndex, c10::EventFlag) const override {
        Locked locked(state_lock);
        if (*event == nullptr) {
            *event = new Mark;
        }
        auto& mark = *static_cast<Mark*>(*event);
        mark.clock = state.clocks[lane_of(stream)];
        mark.time = std::chrono::steady_clock::now();
        mark.questions = 0;
    }

    void destroyEvent(void* event, DeviceIndex) const noexcept override {
        delete static_cast<Mark*>(event);
    }

    void block(void* event, const Stream& stream) const override {
        if (event != nullptr) {
            Locked locked(state_lock);
            state.clocks[lane_of(stream)].join(static_cast<Mark*>(event)->clock);
        }
    }

    bool queryEvent(void* event) const override {
        if (event == nullptr) {
            return true;
        }
        auto& mark = *static_cast<Mark*>(event);
        Clock clock;
        {
            Locked locked(state_lock);
            if (state.host.includes(mark.clock)) {
                return true;
            }
            if (++mark.questions <= kQuestions) {
                return false;
            }
            clock = mark.clock;
        }
        reach(clock);
        return true;
    }

    void synchronizeEvent(void* event) const override {
        if (event == nullptr) {
            return;
        }
        count_synchronization(current_device);
        Clock clock;
        {
            Locked locked(state_lock);
            clock = static_cast<Mark*>(event)->clock;
        }
        reach(clock);
    }

    // Milliseconds.
    double elapsedTime(void* first, void* second, DeviceIndex) const override {
        Locked locked(state_lock);
        const auto spent = static_cast<Mark*>(second)->time - static_cast<Mark*>(first)->time;
        return std::chrono::duration<double, std::milli>(spent).count();
    }

    void recordDataPtrOnStream(const c10::DataPtr& memory, const Stream& stream) const override {
        device_memory.recordStream(memory, stream);
    }
};

struct Hooks final : at::PrivateUse1HooksInterface {
    bool isBuilt() const override {
        return true;
    }

    bool isAvailable() const override {
        return true;
    }

    bool hasPrimaryContext(DeviceIndex) const override {
        return true;
    }

    DeviceIndex deviceCount() const override {
        return kDevices;
    }

    void setCurrentDevice(DeviceIndex device) const override {
        current_device = checked(device);
    }

    DeviceIndex getCurrentDevice() const override {
        return current_device;
    }

    DeviceIndex exchangeDevice(DeviceIndex device) const override {
        return std::exchange(current_device, checked(device));
    }

    DeviceIndex maybeExchangeDevice(DeviceIndex device) const override {
        return device < 0 ? current_device : exchangeDevice(device);
    }

    const at::Generator& getDefaultGenerator(DeviceIndex device) const override {
        return default_generator(device);
    }

    at::Generator getNewGenerator(DeviceIndex device) const override {
        auto generator = at::make_generator<DeviceGenerator>(device < 0 ? current_device : checked(device));
        generator.set_current_seed(c10::default_rng_seed_val);
        return generator;
    }

    c10::Allocator* getPinnedMemoryAllocator() const override {
        return &pinned_memory;
    }

    bool isPinnedPtr(const void* address) const override {
        return is_pinned(address);
    }

    c10::Device getDeviceFromPtr(void* address) const override {
        Locked locked(state_lock);
        auto* found = block_at(address);
        TORCH_CHECK(found != nullptr && !found->second.on_host, "this is no memory of vgpu");
        return {kVgpu, device_of(found->second.lane)};
    }

    void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
        resize_bytes(storage, bytes);
    }
};

// Says what a segmentation fault in the arena means, and leaves the rest to whoever was there before
// (faulthandler).
struct sigaction handler_before;

void explain_fault(int number, siginfo_t* info, void*) {
    const auto* address = static_cast<const char*>(info->si_addr);
    if (state.arena != nullptr && address >= state.arena && address < state.arena + kArenaBytes) {
        constexpr char message[] =
            "vgpu: the host used memory of the device (a data_ptr): copy it to the CPU first\n";
        [[maybe_unused]] auto written = write(STDERR_FILENO, message, sizeof message - 1);
    }
    sigaction(number, &handler_before, nullptr);  // the instruction is run again, and faults again
}

bool install() {
    c10::SetAllocator(kVgpu, &device_memory);
    at::setHostAllocator(kVgpu, &pinned_memory);
    at::RegisterPrivateUse1HooksInterface(new Hooks);
    at::native::_fused_sdp_choice_stub.set_privateuse1_dispatch_ptr(&choose_attention);
    struct sigaction handler {};
    handler.sa_sigaction = &explain_fault;
    handler.sa_flags = SA_SIGINFO | SA_ONSTACK;
    return sigaction(SIGSEGV, &handler, &handler_before) == 0;
}

const bool installed = install();

C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
    library.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
    library.impl("empty.memory_format", &empty);
    library.impl("empty_strided", &empty_strided);
    library.impl("_copy_from", &copy_from);
    library.impl("as_strided", TORCH_FN(at::native::as_strided_tensorimpl));
    library.impl("view", TORCH_FN(at::native::view));
    library.impl("_reshape_alias", TORCH_FN(at::native::_reshape_alias));
    library.impl("resize_", &resize_);
    library.impl("set_", &set_to_nothing);
    library.impl("set_.source_Storage", static_cast<Tensor& (*)(Tensor&, c10::Storage)>(&at::native::set_));
    library.impl("set_.source_Storage_storage_offset", TORCH_FN(at::native::set_storage_cpu_));
    library.impl("native_dropout", &native_dropout);
    library.impl("convolution_overrideable", &convolution);
    library.impl("convolution_backward_overrideable", &convolution_backward);
    library.impl("record_stream", &record_stream);
    // One kernel for a list of tensors, as on a GPU; else torch launches one for each of them.
    for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
        if (name.name.rfind("aten::_foreach_", 0) == 0) {
            library.impl(c10::toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
        }
    }
}

TORCH_LIBRARY(vgpu, library) {
    library.def("errors() -> str[]", [] {
        Locked locked(state_lock);
        return std::exchange(state.errors, {});
    });
    library.def("counts(int device) -> int[]", [](int64_t device) {
        Locked locked(state_lock);
        const auto& counted = state.devices[checked(static_cast<DeviceIndex>(device))];
        return std::vector<int64_t>{counted.synchronizations, counted.launches};
    });
    library.def("limit(int device, int bytes) -> ()", [](int64_t device, int64_t bytes) {
        Locked locked(state_lock);
        state.devices[checked(static_cast<DeviceIndex>(device))].limit = bytes > 0 ? bytes : kCapacity;
    });
    library.def("default_generator(int device) -> Generator?", [](int64_t device) {
        return default_generator(static_cast<DeviceIndex>(device));
    });
    library.def("register_host(Tensor memory) -> ()", &register_host);
    library.def("unregister_host(Tensor memory) -> ()", &unregister_host);
    library.def("claim(Tensor tensor, bool writes) -> ()", &claim);
    library.def("peek(Tensor tensor) -> Tensor", &peek);
    library.def("poke(Tensor(a!) tensor, Tensor values) -> ()", &poke);
}

}  // namespace

extern "C" void vgpu_on_load(void (*callback)(const char*)) { on_load = callback; }
