// A simulated CUDA device in torch's CPU build.
//
// Its tensors are ordinary tensors whose storage says cuda:0 and lies in the memory of the host. An
// operation runs on tensors of the CPU that share this memory, and its results say cuda:0 again. So
// dispatch, autocast, autograd with its device thread, views, pickling and user subclasses are
// torch's own. What CUDA refuses is refused here, and `report` tells Python about every operation.
//
// Load it before torch is imported: torch looks for the hooks of CUDA once.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/resize_native.h>
#include <ATen/ops/set_native.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <deque>
#include <mutex>
#include <unordered_set>

namespace simgpu {

using at::Tensor;
using c10::DispatchKey;
using c10::IValue;
using torch::jit::Stack;

const c10::Device kGPU(c10::DeviceType::CUDA, 0);

// ------------------------------------------------------------------------------------ reports

// Called with an operation's name and what it costs; see `Cost`. Returning true means that it
// fails for want of memory.
using Report = int (*)(const char* operation, int cost);
std::atomic<Report> report_to{nullptr};

enum Cost { LAUNCH = 0, WAIT = 1, LAUNCH_AND_WAIT = 2 };

void report(const std::string& operation, Cost cost) {
  Report call = report_to.load();
  if (call == nullptr) return;
  if (call(operation.c_str(), cost)) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB");
  }
}

extern "C" __attribute__((visibility("default"))) void simgpu_report_to(Report call) {
  report_to.store(call);
}

// ------------------------------------------------------------------------------------- memory

// Memory of the device. It is filled with 0xFF, which is NaN, so that results do not depend on
// what an earlier tensor left there.
struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = bytes ? c10::GetCPUAllocator()->raw_allocate(bytes) : nullptr;
    if (bytes) std::memset(data, 0xFF, bytes);
    return {data, data, &release, kGPU};
  }
  static void release(void* data) {
    if (data != nullptr) c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} device_allocator;
const int registered = (c10::SetAllocator(c10::DeviceType::CUDA, &device_allocator), 0);

std::mutex pinned_lock;
std::unordered_set<const void*> pinned;

struct PinnedAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* data = c10::GetCPUAllocator()->raw_allocate(std::max<size_t>(bytes, 1));
    std::lock_guard<std::mutex> held(pinned_lock);
    pinned.insert(data);
    return {data, data, &release, c10::kCPU};
  }
  static void release(void* data) {
    {
      std::lock_guard<std::mutex> held(pinned_lock);
      pinned.erase(data);
    }
    c10::GetCPUAllocator()->raw_deallocate(data);
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
} pinned_allocator;

bool is_pinned(const void* storage) {
  std::lock_guard<std::mutex> held(pinned_lock);
  return pinned.count(storage) > 0;
}

bool is_pinned(const Tensor& x) { return is_pinned(x.storage().data()); }

// ------------------------------------------------------------------- one memory, two devices

void release_storage(void* context) { delete static_cast<c10::Storage*>(context); }

// A storage over the same memory that says another device. It keeps the first one alive.
c10::Storage shared(const c10::Storage& storage, c10::Device device) {
  c10::Allocator* allocator = device == kGPU ? &device_allocator : c10::GetCPUAllocator();
  void* data = const_cast<void*>(storage.data());
  c10::DataPtr memory(data, new c10::Storage(storage), &release_storage, device);
  return c10::make_intrusive<c10::StorageImpl>(
      c10::StorageImpl::use_byte_size_t(), storage.nbytes(), std::move(memory), allocator, true);
}

Tensor with_storage(const Tensor& x, c10::Storage storage, c10::Device device) {
  Tensor y = at::detail::make_tensor<c10::TensorImpl>(
      std::move(storage), c10::DispatchKeySet(device == kGPU ? DispatchKey::CUDA : DispatchKey::CPU), x.dtype());
  auto* impl = y.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  if (x.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (x.is_neg()) y._set_neg(true);
  if (x.is_conj()) y._set_conj(true);
  return y;
}

bool on_gpu(const Tensor& x) { return x.defined() && x.device() == kGPU; }

Tensor to_host(const Tensor& x) {
  return on_gpu(x) ? with_storage(x, shared(x.storage(), c10::kCPU), c10::kCPU) : x;
}

Tensor to_gpu(const Tensor& x) { return with_storage(x, shared(x.storage(), kGPU), kGPU); }

// ---------------------------------------------------------------------------- random numbers

// The generator of the device: one of the CPU that says cuda:0.
struct Generator final : c10::GeneratorImpl {
  explicit Generator(at::Generator inner)
      : c10::GeneratorImpl(kGPU, c10::DispatchKeySet(DispatchKey::CUDA)), inner(std::move(inner)) {}
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  void set_offset(uint64_t) override { TORCH_CHECK(false, "simgpu: no offsets"); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& state) override {
    inner.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return inner.unsafeGetGeneratorImpl()->get_state();
  }
  Generator* clone_impl() const override { return new Generator(inner.clone()); }
  at::Generator inner;
};

at::Generator new_generator() {
  return at::make_generator<Generator>(at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

const at::Generator& default_generator() {
  static at::Generator generator = new_generator();
  return generator;
}

at::Generator host_generator(const std::optional<at::Generator>& given) {
  const at::Generator& generator = given && given->defined() ? *given : default_generator();
  TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '",
              generator.device().type(), "'");
  return static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
}

// ------------------------------------------------------------------------- device and hooks

struct Guard final : c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::CUDA> {
  static c10::Stream stream() { return c10::Stream(c10::Stream::DEFAULT, kGPU); }
  c10::Device exchangeDevice(c10::Device) const override { return kGPU; }
  c10::Device getDevice() const override { return kGPU; }
  c10::DeviceIndex deviceCount() const noexcept override { return 1; }
  c10::Stream getStream(c10::Device) const noexcept override { return stream(); }
  c10::Stream getNewStream(c10::Device, int) const override { return stream(); }
  c10::Stream exchangeStream(c10::Stream) const noexcept override { return stream(); }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
};
c10::impl::DeviceGuardImplRegistrar guard(c10::DeviceType::CUDA, new Guard());

}  // namespace simgpu

namespace at {

struct CUDAHooks : CUDAHooksInterface {
  CUDAHooks(CUDAHooksArgs) {}
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  int getNumGPUs() const override { return 1; }
  bool isPinnedPtr(const void* data) const override { return simgpu::is_pinned(data); }
  Allocator* getPinnedMemoryAllocator() const override { return &simgpu::pinned_allocator; }
  Allocator* getCUDADeviceAllocator() const override { return &simgpu::device_allocator; }
  Device getDeviceFromPtr(void*) const override { return simgpu::kGPU; }
  const Generator& getDefaultGenerator(DeviceIndex) const override {
    return simgpu::default_generator();
  }
  Generator getNewGenerator(DeviceIndex) const override { return simgpu::new_generator(); }
};

using at::RegistererCUDAHooksRegistry;
REGISTER_CUDA_HOOKS(CUDAHooks);

}  // namespace at

namespace simgpu {

// --------------------------------------------------------------------------------- operations

bool starts_with(const std::string& name, const char* prefix) { return name.rfind(prefix, 0) == 0; }

bool is_indexing(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_",
      "aten::_unsafe_index", "aten::_unsafe_index_put"};
  return names.count(name) > 0;
}

// Operations of CUDA after which the host waits for a size or a value.
bool always_waits(const std::string& name) {
  static const std::unordered_set<std::string> names = {
      "aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
      "aten::is_nonzero", "aten::_unique", "aten::_unique2", "aten::unique_dim",
      "aten::unique_consecutive", "aten::unique_dim_consecutive", "aten::bincount", "aten::histc"};
  return names.count(name) > 0;
}

// One launch of a list is refused if a tensor of it is elsewhere, even one without dimensions.
bool wants_all_on_gpu(const std::string& name) {
  return starts_with(name, "aten::_foreach") || starts_with(name, "aten::_fused") ||
         starts_with(name, "aten::_amp_foreach");
}

[[noreturn]] void refuse(const std::string& name) {
  TORCH_CHECK(false, "Expected all tensors to be on the same device, but found at least two "
              "devices, cuda:0 and cpu! (", name, ")");
}

// What an operation is given: counts its waits, and refuses tensors of another device.
Cost check_arguments(const c10::OperatorHandle& op, const std::string& name, const Stack& stack,
                     size_t first) {
  const auto& arguments = op.schema().arguments();
  bool waits = always_waits(name);
  bool any_on_gpu = false;
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = stack[first + i];
    if (value.isTensor()) any_on_gpu |= on_gpu(value.toTensor());
    if (value.isTensorList())
      for (const Tensor& x : value.toTensorVector()) any_on_gpu |= on_gpu(x);
  }
  auto check = [&](const Tensor& x, bool in_list) {
    if (!any_on_gpu || !x.defined() || on_gpu(x)) return;
    if (x.dim() > 0 || (in_list && wants_all_on_gpu(name))) refuse(name);
  };
  for (size_t i = 0; i < arguments.size(); ++i) {
    const IValue& value = stack[first + i];
    const std::string& argument = arguments[i].name();
    if (value.isTensor()) {
      check(value.toTensor(), false);
    } else if (value.isTensorList()) {
      for (const Tensor& x : value.toTensorVector()) check(x, true);
    } else if (value.isOptionalTensorList()) {
      for (const std::optional<Tensor>& x : value.toOptionalTensorVector()) {
        if (!x || !x->defined()) continue;
        if (is_indexing(name)) {
          if (!on_gpu(stack[first].toTensor())) refuse(name);
          // A mask becomes indices, whose number the host must know. Indices of the host are copied.
          waits |= x->scalar_type() == at::kBool || x->scalar_type() == at::kByte || !on_gpu(*x);
        } else {
          check(*x, true);
        }
      }
    } else if (name == "aten::repeat_interleave" && argument == "output_size") {
      waits |= value.isNone();
    } else if (name == "aten::segment_reduce" && argument == "unsafe") {
      waits |= !value.toBool();
    }
  }
  return waits ? LAUNCH_AND_WAIT : LAUNCH;
}

// The kernel of almost every operation: run the CPU's on the same memory.
void run_on_host(const c10::OperatorHandle& op, Stack* stack) {
  const auto& schema = op.schema();
  const std::string& name = schema.name();
  const size_t count = schema.arguments().size();
  const size_t first = stack->size() - count;
  Cost cost = check_arguments(op, name, *stack, first);
  report(name, cost);

  std::vector<IValue> given(stack->begin() + first, stack->end());
  std::deque<std::pair<Tensor, Tensor>> pairs;  // (on the device, on the host)
  auto host = [&](const Tensor& x) {
    if (!on_gpu(x)) return x;
    for (auto& pair : pairs)
      if (pair.first.is_same(x)) return pair.second;
    pairs.emplace_back(x, to_host(x));
    return pairs.back().second;
  };
  bool has_generator = false;
  bool result_on_gpu = true;
  for (size_t i = 0; i < count; ++i) {
    IValue& value = (*stack)[first + i];
    const auto& type = schema.arguments()[i].type();
    if (value.isTensor()) {
      if (value.toTensor().defined()) value = host(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(host(x));
      value = list;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& x : value.toOptionalTensorVector())
        list.push_back(x && x->defined() ? std::optional<Tensor>(host(*x)) : x);
      value = list;
    } else if (value.isDevice() || (value.isNone() && schema.arguments()[i].name() == "device")) {
      if (value.isDevice()) result_on_gpu = value.toDevice().is_cuda();
      if (value.isDevice()) value = c10::Device(c10::kCPU);
    } else if (schema.arguments()[i].name() == "pin_memory" && value.isBool()) {
      value = false;
    } else if (type->str() == "Generator?" || type->str() == "Generator") {
      std::optional<at::Generator> generator;
      if (!value.isNone()) generator = value.toGenerator();
      value = host_generator(generator);
      has_generator = true;
    }
  }
  {
    at::AutoDispatchBelowADInplaceOrView below;
    c10::impl::ExcludeDispatchKeyGuard no_autocast(c10::autocast_dispatch_keyset);
    op.callBoxed(stack);
  }
  (void)has_generator;

  // Results. An argument that is returned keeps its identity; one that was resized gets the memory.
  for (auto& [device, memory] : pairs) {
    if (memory.storage().data() != device.storage().data()) {
      auto resized = to_gpu(memory);
      device.unsafeGetTensorImpl()->set_storage_keep_dtype(resized.storage());
    }
    if (memory.sizes() != device.sizes() || memory.strides() != device.strides())
      device.unsafeGetTensorImpl()->set_sizes_and_strides(memory.sizes(), memory.strides(), memory.storage_offset());
  }
  auto result_of = [&](const Tensor& x) -> Tensor {
    if (!x.defined() || !result_on_gpu) return x;
    for (auto& [device, memory] : pairs) {
      if (memory.is_same(x)) return device;
      if (memory.storage().is_alias_of(x.storage())) return with_storage(x, device.storage(), kGPU);
    }
    return x.is_cpu() ? to_gpu(x) : x;
  };
  const size_t results = schema.returns().size();
  const size_t begin = stack->size() - results;
  for (size_t i = 0; i < results; ++i) {
    IValue& value = (*stack)[begin + i];
    if (value.isTensor()) {
      value = result_of(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& x : value.toTensorVector()) list.push_back(result_of(x));
      value = list;
    }
  }
}

// -------------------------------------------------------------------------------- collectives

// The value with its tensors on the host, on the same memory.
IValue on_host(const IValue& value) {
  if (value.isTensor()) return value.toTensor().defined() ? to_host(value.toTensor()) : value;
  if (value.isTensorList()) {
    c10::List<Tensor> list;
    for (const Tensor& x : value.toTensorVector()) list.push_back(to_host(x));
    return list;
  }
  if (!value.isList()) return value;
  c10::List<c10::List<Tensor>> lists;  // the only other lists of the collectives
  for (const IValue& row : value.toListRef()) lists.push_back(on_host(row).toTensorList());
  return lists;
}

// The kernel of every collective: gloo's on the same memory. It returns its first argument, into
// which it writes, and the work to wait for.
void communicate(const c10::OperatorHandle& op, Stack* stack) {
  const size_t count = op.schema().arguments().size();
  report(op.schema().name(), LAUNCH);
  const IValue written = (*stack)[stack->size() - count];
  for (size_t i = stack->size() - count; i < stack->size(); ++i) (*stack)[i] = on_host((*stack)[i]);
  op.callBoxed(stack);
  if (op.schema().returns().size() == 2) (*stack)[stack->size() - 2] = written;
}

// ----------------------------------------------------------------------- memory and its views

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<at::Device>, std::optional<bool> pin_memory,
             std::optional<at::MemoryFormat> memory_format) {
  TORCH_CHECK(!pin_memory.value_or(false), "Only dense CPU tensors can be pinned");
  return at::detail::empty_generic(size, &device_allocator, c10::DispatchKeySet(DispatchKey::CUDA),
                                   c10::dtype_or_default(dtype), memory_format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<at::Device>, std::optional<bool>) {
  return at::detail::empty_strided_generic(size, stride, &device_allocator,
                                           c10::DispatchKeySet(DispatchKey::CUDA),
                                           c10::dtype_or_default(dtype));
}

Tensor& copy_(Tensor& self, const Tensor& from, bool non_blocking) {
  bool waits = false;
  std::string name = "copy on the GPU";
  if (!on_gpu(from)) {
    const bool is_scalar = from.dim() == 0;
    waits = from.numel() > 0 && !(non_blocking && is_pinned(from));
    name = is_scalar ? "copy of a number to the GPU"
                     : is_pinned(from) ? "copy to the GPU" : "copy to the GPU from pageable memory";
  } else if (!on_gpu(self)) {
    waits = from.numel() > 0 && !(non_blocking && is_pinned(self));
    name = is_pinned(self) ? "copy to the host" : "copy to the host's pageable memory";
  }
  if (from.numel() > 0) report(name, waits ? LAUNCH_AND_WAIT : LAUNCH);
  at::AutoDispatchBelowADInplaceOrView below;
  to_host(self).copy_(to_host(from));
  return self;
}

std::tuple<Tensor, Tensor> native_dropout(const Tensor& x, double p, std::optional<bool> train) {
  report("aten::native_dropout", LAUNCH);
  at::AutoDispatchBelowADInplaceOrView below;
  Tensor values = to_host(x);
  if (x.numel() == 0 || !train.value_or(true))
    return {to_gpu(values.clone()), to_gpu(at::ones(x.sizes(), at::kBool))};
  Tensor mask = at::empty(x.sizes(), at::kBool).bernoulli_(1 - p, host_generator(std::nullopt));
  return {to_gpu(values * mask * (p == 1 ? 0.0 : 1 / (1 - p))), to_gpu(mask)};
}

// Which attention an H100 takes: flash without a mask (0 to 2 are torch.nn.attention.SDPBackend),
// the efficient kernel with one, torch's plain operations where neither can.
int64_t attention_choice(const Tensor& query, const Tensor& key, const Tensor&,
                         const std::optional<Tensor>& mask, double dropout, bool,
                         std::optional<double>, bool enable_gqa) {
  constexpr int64_t kMath = 0, kFlash = 1, kEfficient = 2;
  if (mask && mask->defined() && !on_gpu(*mask)) refuse("scaled_dot_product_attention");
  if (query.dim() != 4 || dropout > 0) return kMath;
  const bool is_half = query.scalar_type() == at::kHalf || query.scalar_type() == at::kBFloat16;
  const bool has_mask = mask && mask->defined();
  if (is_half && !has_mask && query.size(3) <= 256) return kFlash;
  const bool is_aligned = query.size(3) % (is_half ? 8 : 4) == 0;
  const bool is_grouped = enable_gqa && query.size(1) != key.size(1);
  return is_grouped || !is_aligned ? kMath : kEfficient;
}
const int chosen = (at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&attention_choice), 0);

// Operations whose kernels above or in torch do not depend on the device.
const std::unordered_set<std::string>& registered_here() {
  static const std::unordered_set<std::string> names = {
      "aten::empty.memory_format", "aten::empty_strided", "aten::as_strided", "aten::view",
      "aten::_reshape_alias", "aten::unfold", "aten::set_.source_Storage",
      "aten::set_.source_Storage_storage_offset", "aten::set_.source_Tensor", "aten::set_",
      "aten::resize_", "aten::copy_", "aten::native_dropout", "aten::_fused_sdp_choice"};
  return names;
}

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("as_strided", at::native::as_strided_tensorimpl);
  m.impl("view", at::native::view);
  m.impl("_reshape_alias", at::native::_reshape_alias);
  m.impl("unfold", at::native::unfold);
  m.impl("set_.source_Storage", at::native::set_);
  m.impl("set_.source_Storage_storage_offset", at::native::set_storage_cpu_);
  m.impl("set_.source_Tensor", at::native::set_tensor_);
  m.impl("set_", at::native::set_cpu_);
  m.impl("resize_", at::native::resize_);
  m.impl("copy_", copy_);
  m.impl("native_dropout", native_dropout);
}

struct Silent final : c10::WarningHandler {
  void process(const c10::Warning&) override {}
};

// CUDA has a kernel wherever the CPU has one, and one launch for a list of tensors, where the
// CPU's build would take the operation apart.
std::vector<c10::RegistrationHandleRAII> register_kernels() {
  Silent silent;  // torch's build has collectives of CUDA, without a backend, and says what replaces them
  c10::WarningUtils::WarningHandlerGuard quiet(&silent);
  std::vector<c10::RegistrationHandleRAII> handles;
  auto& dispatcher = c10::Dispatcher::singleton();
  auto kernel = c10::KernelFunction::makeFromBoxedFunction<&run_on_host>();
  handles.push_back(dispatcher.registerFallback(DispatchKey::CUDA, kernel, "simgpu"));
  auto collective = c10::KernelFunction::makeFromBoxedFunction<&communicate>();
  for (const auto& name : dispatcher.getAllOpNames()) {
    if (starts_with(name.name, "c10d::"))
      handles.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA, collective, std::nullopt, nullptr, "simgpu"));
    if (!starts_with(name.name, "aten::")) continue;
    std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    auto op = dispatcher.findOp(name);
    if (!op || registered_here().count(full) || !op->hasSchema()) continue;
    if (!op->hasKernelForDispatchKey(DispatchKey::CPU) && !wants_all_on_gpu(name.name)) continue;
    handles.push_back(dispatcher.registerImpl(name, DispatchKey::CUDA, kernel, std::nullopt, nullptr, "simgpu"));
  }
  return handles;
}

// Kept until the process ends.
const auto& kernels = *new std::vector<c10::RegistrationHandleRAII>(register_kernels());

// `UntypedStorage.resize_`, with which FSDP frees gathered weights.
void resize_storage(const Tensor& x, int64_t bytes) {
  at::native::resize_bytes_cpu(x.storage().unsafeGetStorageImpl(), bytes);
}

TORCH_LIBRARY(simgpu, m) {
  m.def("to_host(Tensor x) -> Tensor", &to_host);
  m.def("to_gpu(Tensor x) -> Tensor", &to_gpu);
  m.def("resize_storage(Tensor x, int bytes) -> ()", &resize_storage);
  m.def("default_generator() -> Generator?", [] { return std::optional<at::Generator>(default_generator()); });
}

}  // namespace simgpu
