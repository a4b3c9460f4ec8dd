// A CUDA device that is none: its tensors' memory is the host's, and so is their arithmetic.
//
// Every operation on CUDA tensors comes to `on_the_host`, which hands the same memory to the CPU's
// kernel and its results back as CUDA tensors. Tensors of both devices are refused as a GPU refuses
// them: a CPU tensor may be a number (0-d), or an index. Loaded after torch is imported.

#include <ATen/ATen.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/EmptyTensor.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <cstring>
#include <new>

using namespace c10;

namespace {

const Device GPU(DeviceType::CUDA, 0);
const Device HOST(DeviceType::CPU);

// ------------------------------------------------------------------ what torch asks of a device

struct Guard final : impl::DeviceGuardImplInterface {
  DeviceType type() const override { return DeviceType::CUDA; }
  Device exchangeDevice(Device) const override { return GPU; }
  Device getDevice() const override { return GPU; }
  void setDevice(Device) const override {}
  void uncheckedSetDevice(Device) const noexcept override {}
  Stream getStream(Device) const noexcept override { return Stream(Stream::DEFAULT, GPU); }
  Stream getNewStream(Device, int = 0) const override { return Stream(Stream::DEFAULT, GPU); }
  Stream exchangeStream(Stream) const noexcept override { return Stream(Stream::DEFAULT, GPU); }
  DeviceIndex deviceCount() const noexcept override { return 1; }
  void record(void**, const Stream&, const DeviceIndex, const EventFlag) const override {}
  void block(void*, const Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const DeviceIndex) const noexcept override {}
  bool queryStream(const Stream&) const override { return true; }
  void synchronizeStream(const Stream&) const override {}
  void synchronizeDevice(const DeviceIndex) const override {}
  void recordDataPtrOnStream(const DataPtr&, const Stream&) const override {}
};

Guard guard;
impl::DeviceGuardImplRegistrar guard_registrar(DeviceType::CUDA, &guard);

struct Hooks final : at::CUDAHooksInterface {
  void init() const override {}
  bool hasCUDA() const override { return true; }
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  DeviceIndex current_device() const override { return 0; }
  DeviceIndex deviceCount() const override { return 1; }
  DeviceIndex getCurrentDevice() const override { return 0; }
  void setCurrentDevice(DeviceIndex) const override {}
  DeviceIndex exchangeDevice(DeviceIndex) const override { return 0; }
  DeviceIndex maybeExchangeDevice(DeviceIndex) const override { return 0; }
  Allocator* getPinnedMemoryAllocator() const override { return GetCPUAllocator(); }
  Device getDeviceFromPtr(void*) const override { return GPU; }
  const at::Generator& getDefaultGenerator(DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(DeviceIndex) const override {
    return at::make_generator<at::CPUGeneratorImpl>();
  }
  void deviceSynchronize(DeviceIndex) const override {}
};

// torch has made its own hooks, without CUDA, by the time that this is loaded, and keeps them. They
// hold nothing, so others fit in their place.
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));
const auto* hooks =
    new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();

// ----------------------------------------------------------------------------------- its memory

struct Memory final : Allocator {
  DataPtr allocate(size_t bytes) override {
    auto* held = new DataPtr(GetCPUAllocator()->allocate(bytes));
    auto release = [](void* x) { delete static_cast<DataPtr*>(x); };
    return DataPtr(held->get(), held, release, GPU);
  }
  DeleterFnPtr raw_deleter() const override { return nullptr; }
  void copy_data(void* to, const void* from, size_t bytes) const override {
    std::memcpy(to, from, bytes);
  }
};

Memory memory;

// The same memory as a tensor of the other device, which keeps it alive.
at::Tensor on(Device device, const at::Tensor& x) {
  auto* held = new Storage(x.storage());
  auto release = [](void* storage) { delete static_cast<Storage*>(storage); };
  Allocator* allocator = device.is_cuda() ? static_cast<Allocator*>(&memory) : GetCPUAllocator();
  Storage storage(
      Storage::use_byte_size_t(),
      held->nbytes(),
      DataPtr(held->mutable_data(), held, release, device),
      allocator,
      /*resizable=*/true);
  DispatchKeySet keys(device.is_cuda() ? DispatchKey::CUDA : DispatchKey::CPU);
  auto found = at::detail::make_tensor<TensorImpl>(std::move(storage), keys, x.dtype());
  found.unsafeGetTensorImpl()->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  return found;
}

at::Tensor host(const at::Tensor& x) { return x.defined() && x.is_cuda() ? on(HOST, x) : x; }

at::Tensor& take(at::Tensor& self, const at::Tensor& other) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(other.storage());
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      other.sizes(), other.strides(), other.storage_offset());
  return self;
}

// --------------------------------------------------------------- operations that make or move it

at::Tensor empty(
    SymIntArrayRef size,
    std::optional<ScalarType> dtype,
    std::optional<Layout>,
    std::optional<Device>,
    std::optional<bool>,
    std::optional<MemoryFormat> format) {
  DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_generic(
      C10_AS_INTARRAYREF_SLOW(size), &memory, keys, dtype_or_default(dtype), format);
}

at::Tensor empty_strided(
    SymIntArrayRef size,
    SymIntArrayRef stride,
    std::optional<ScalarType> dtype,
    std::optional<Layout>,
    std::optional<Device>,
    std::optional<bool>) {
  DispatchKeySet keys(DispatchKey::CUDA);
  return at::detail::empty_strided_generic(
      C10_AS_INTARRAYREF_SLOW(size),
      C10_AS_INTARRAYREF_SLOW(stride),
      &memory,
      keys,
      dtype_or_default(dtype));
}

at::Tensor& copy_(at::Tensor& self, const at::Tensor& from, bool) {
  host(self).copy_(host(from));
  return self;
}

at::Tensor copy_from(const at::Tensor& from, const at::Tensor& to, bool) {
  host(to).copy_(host(from));
  return to;
}

const at::Tensor& resize_(
    const at::Tensor& self, SymIntArrayRef size, std::optional<MemoryFormat>) {
  auto sizes = C10_AS_INTARRAYREF_SLOW(size);
  auto& storage = self.unsafeGetTensorImpl()->unsafe_storage();
  size_t bytes = (c10::multiply_integers(sizes) + self.storage_offset()) * self.itemsize();
  if (storage.nbytes() < bytes) {
    auto larger = memory.allocate(bytes);
    if (storage.nbytes()) std::memcpy(larger.get(), storage.data(), storage.nbytes());
    storage.set_data_ptr_noswap(std::move(larger));
    storage.set_nbytes(bytes);
  }
  self.unsafeGetTensorImpl()->set_sizes_contiguous(sizes);
  return self;
}

at::Tensor& set_window(
    at::Tensor& self, Storage from, SymInt offset, SymIntArrayRef size, SymIntArrayRef stride) {
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(from);
  self.unsafeGetTensorImpl()->set_sizes_and_strides(
      C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_whole(at::Tensor& self, Storage from) {
  auto count = static_cast<int64_t>(from.nbytes() / self.itemsize());
  self.unsafeGetTensorImpl()->set_storage_keep_dtype(from);
  self.unsafeGetTensorImpl()->set_sizes_contiguous(IntArrayRef(count));
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& from) { return take(self, from); }

// ------------------------------------------------------- operations that a CPU has not, or others

int64_t attention_by_its_definition(
    const at::Tensor&,
    const at::Tensor&,
    const at::Tensor&,
    const std::optional<at::Tensor>&,
    double,
    bool,
    std::optional<double>,
    bool) {
  return 0;
}

at::Tensor& mm_out(const at::Tensor& a, const at::Tensor& b, ScalarType dtype, at::Tensor& out) {
  TORCH_CHECK(a.is_cuda() && b.is_cuda() && out.is_cuda() && out.scalar_type() == dtype);
  host(out).copy_(host(a).to(dtype).mm(host(b).to(dtype)));
  return out;
}

at::Tensor& addmm_out(
    const at::Tensor& c,
    const at::Tensor& a,
    const at::Tensor& b,
    ScalarType dtype,
    const at::Scalar& beta,
    const at::Scalar& alpha,
    at::Tensor& out) {
  TORCH_CHECK(a.is_cuda() && b.is_cuda() && out.is_cuda() && out.scalar_type() == dtype);
  auto product = at::addmm(host(c).to(dtype), host(a).to(dtype), host(b).to(dtype), beta, alpha);
  host(out).copy_(product);
  return out;
}

// --------------------------------------------------------------------------- all other operations

bool takes_indices_of_the_host(const std::string& name) {
  return name == "aten::index" || name == "aten::index_put" || name == "aten::index_put_" ||
      name == "aten::_index_put_impl_";
}

void on_the_host(const OperatorHandle& op, DispatchKeySet, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const auto count = schema.arguments().size();
  std::vector<at::Tensor> given, given_host;  // CUDA tensors, and what stands for them
  std::optional<at::Tensor> of_host;
  auto enter = [&](const at::Tensor& x) -> at::Tensor {
    if (!x.defined()) return x;
    if (!x.is_cuda()) {
      if (x.dim()) of_host = x;
      return x;
    }
    for (size_t i = 0; i < given.size(); ++i)
      if (given[i].is_same(x)) return given_host[i];
    given.push_back(x);
    given_host.push_back(host(x));
    return given_host.back();
  };
  torch::jit::Stack own;
  for (size_t i = stack->size() - count; i < stack->size(); ++i) {
    const auto& value = (*stack)[i];
    if (value.isTensor()) {
      own.emplace_back(enter(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& x : value.toTensorVector()) list.push_back(enter(x));
      own.emplace_back(std::move(list));
    } else if (value.isOptionalTensorList()) {
      List<std::optional<at::Tensor>> list;
      for (const auto& x : value.toOptionalTensorVector())
        list.push_back(x ? std::optional<at::Tensor>(enter(*x)) : std::nullopt);
      own.emplace_back(std::move(list));
    } else if (value.isDevice() && value.toDevice().is_cuda()) {
      own.emplace_back(HOST);
    } else {
      own.push_back(value);
    }
  }
  TORCH_CHECK(
      given.empty() || !of_host || takes_indices_of_the_host(schema.name()),
      "Expected all tensors to be on the same device: ",
      schema.name(),
      " got a CPU tensor of ",
      of_host ? of_host->sizes() : IntArrayRef());
  torch::jit::drop(*stack, count);
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), &own);
  auto leave = [&](const at::Tensor& x) -> at::Tensor {
    if (!x.defined() || x.is_cuda()) return x;
    for (size_t i = 0; i < given.size(); ++i)
      if (given_host[i].is_same(x)) return given[i];
    return on(GPU, x);
  };
  for (const auto& value : own) {
    if (value.isTensor()) {
      stack->emplace_back(leave(value.toTensor()));
    } else if (value.isTensorList()) {
      std::vector<at::Tensor> list;
      for (const auto& x : value.toTensorVector()) list.push_back(leave(x));
      stack->emplace_back(std::move(list));
    } else {
      stack->push_back(value);
    }
  }
  for (size_t i = 0; i < given.size(); ++i) {  // results that were resized
    bool moved = given_host[i].storage().data() != given[i].storage().data();
    if (moved) {
      take(given[i], on(GPU, given_host[i]));
    } else if (given_host[i].sizes() != given[i].sizes()) {
      given[i].unsafeGetTensorImpl()->set_sizes_and_strides(
          given_host[i].sizes(), given_host[i].strides(), given_host[i].storage_offset());
    }
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&on_the_host>());
}

TORCH_LIBRARY_IMPL(aten, CUDA, library) {
  library.impl("empty.memory_format", empty);
  library.impl("empty_strided", empty_strided);
  library.impl("copy_", copy_);
  library.impl("_copy_from", copy_from);
  library.impl("resize_", resize_);
  library.impl("set_.source_Storage", set_whole);
  library.impl("set_.source_Storage_storage_offset", set_window);
  library.impl("set_.source_Tensor", set_tensor);
  library.impl("_fused_sdp_choice", attention_by_its_definition);
  library.impl("mm.dtype_out", mm_out);
  library.impl("addmm.dtype_out", addmm_out);
}
